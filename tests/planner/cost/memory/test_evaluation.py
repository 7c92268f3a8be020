"""The evaluation phase against real forward passes without gradients, and the logits that a loop keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hardware_db.probe import probe_hardware
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.cost.memory.overhead import library_workspace
from planner.errors import ContradictoryRequest
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import price
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Workload
from strategies.tracing.storage_tracker import StorageTracker

SAMPLES, LENGTH = 4, 256
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 3, "n_head": 4}


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "intermediate_size": 1024},
        {**LLAMA, "intermediate_size": 8192},
        {**GPT2, "vocab_size": 1000},
        {**GPT2, "vocab_size": 20000},
    ],
    ids=["llama", "wide-llama", "gpt2", "gpt2-many-words"],
)
@pytest.mark.sweep(every=4)
def test_a_forward_pass_without_gradients(config: dict[str, object]) -> None:
    cluster = probed_cluster(probe_hardware(), ranks=1)
    options = WorkOptions(seq_len=LENGTH, global_batch=1, precision="fp32")
    request, configuration = exact(make_request(facts_from_config(config, "small"), cluster, options), ExactOptions())
    workload = replace(request.workload, evaluation_batch_size=SAMPLES)
    priced = price(replace(request, workload=workload), configuration)
    states = 12 * request.counts.total  # weights and moments, which lie there while it is evaluated
    predicted = priced.memory.phases["eval"] - states - library_workspace(priced.job)
    assert predicted == pytest.approx(_evaluated(config), rel=0.2)


def _evaluated(config: dict[str, object]) -> int:
    """Peak bytes beside the weights of a real evaluation step."""
    settings = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(config["model_type"]), **settings)).eval()
    ids = torch.randint(0, 1000, (SAMPLES, LENGTH))
    model(input_ids=ids[:1, :8])  # makes what is made once
    held = [*model.parameters(), *model.buffers(), ids]
    with torch.no_grad(), StorageTracker(held) as tracker:
        before = tracker.live_bytes
        model(input_ids=ids, labels=ids, use_cache=False)
        return tracker.peak_bytes - before


def test_logits_that_are_kept_are_everybodys_and_concatenated() -> None:
    cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=8))
    options = WorkOptions(seq_len=1024, global_batch=8, precision="bf16")
    request, configuration = exact(
        make_request(facts_from_config(LLAMA | {"intermediate_size": 1024}, "small"), cluster, options), ExactOptions()
    )
    peaks = []
    for steps in (0, 1, 10, 11):
        workload = replace(request.workload, evaluation_batch_size=2, evaluation_steps_kept=steps)
        peaks.append(price(replace(request, workload=workload), configuration).memory.phases["eval"])
    everyones = 4 * 2 * 1024 * 1000 * 8
    assert peaks[0] < peaks[1]
    assert peaks[3] - peaks[2] == pytest.approx(2 * everyones, rel=1e-6)


def test_kept_logits_need_an_evaluation() -> None:
    with pytest.raises(ContradictoryRequest, match="evaluation_steps_kept is 3 without evaluation_batch_size"):
        Workload(task="causal-lm", sequence_length=8, global_batch_size=1, evaluation_steps_kept=3)
