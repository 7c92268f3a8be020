"""Adapters as PEFT makes them, traced, against the closed forms; and the names of weights against real modules."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.overhead import library_workspace
from planner.models.catalogue import find_model
from planner.models.counting.adapters import _names_in, _parameter
from planner.models.counting.count import count_parameters
from planner.models.resolve import resolve_model
from planner.search.estimate import job_of
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from scripts.measure.modules import measured
from strategies.tracing.step.build import subject_of
from strategies.tracing.step.step import trace_step
from strategies.tracing.to_hf import shortened

pytest.importorskip("peft")


def job_with_adapters(model: str, checkpointing: Any, samples: int, length: int, **work: Any) -> Job:
    cluster = resolve_cluster(HardwareRequest(gpu="H100", gpus=1))
    if "method" in work:
        work["lora_rank"] = 16
    options = WorkOptions(seq_len=length, **{"precision": "bf16", **work})
    request = make_request(shortened(find_model(model), 4), cluster, options)
    request, configuration = exact(request, ExactOptions(micro_batch=samples, checkpointing=checkpointing))
    return job_of(request, configuration)


@pytest.mark.parametrize(
    ("model", "checkpointing", "samples", "work"),
    [
        ("llama-3-8b", "none", 2, {"method": "lora"}),
        ("llama-3-8b", "full", 4, {"method": "qlora"}),
        ("opt-1.3b", "none", 2, {"method": "lora", "lora_targets": "q_proj,v_proj", "precision": "bf16-pure"}),
        ("gpt2", "none", 8, {"method": "lora", "lora_targets": "c_attn", "load_dtype": "fp32"}),
        ("qwen3-8b", "none", 2, {"method": "dora", "lora_targets": "attention"}),
        ("llama-3-8b", "none", 2, {"train_only": r"layers\.3\.|lm_head"}),
        ("llama-3-8b", "none", 2, {"load_dtype": "bf16"}),
    ],
)
@pytest.mark.sweep(every=8)
def test_closed_forms_say_what_is_traced_of_adapters_and_frozen_parts(
    model: str, checkpointing: str, samples: int, work: dict[str, Any]
) -> None:
    job = job_with_adapters(model, checkpointing, samples, 512, **work)
    traced = trace_step(job)
    closed = max(phases_of(job)[phase].total - library_workspace(job) for phase in traced.totals)
    assert closed == pytest.approx(traced.peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        "qwen2.5-7b",
        "qwen3-8b",
        "gemma-2-9b",
        "phi-3-mini-4k",
        "opt-1.3b",
        "gpt2",
        "pythia-1b",
        "bert-base-uncased",
    ],
)
def test_names_are_those_of_the_real_module(name: str) -> None:
    facts = shortened(find_model(name), 2)
    real = {key: tuple(weight.shape) for key, weight in subject_of(facts).module.named_parameters()}
    counts = count_parameters(facts)
    named = dict(zip((_parameter(facts, each) for each in counts.names), counts.outside, strict=True))
    index = 0
    for block in counts.blocks:
        for _ in range(block.repeats):
            named |= dict(zip(_names_in(facts, block, index), block.shapes, strict=True))
            index += 1
    assert named == real


@pytest.mark.parametrize(
    ("method", "targets", "checkpointing"),
    [("lora", "all-linear", "none"), ("lora", "q_proj,v_proj", "full"), ("dora", "q_proj,v_proj", "none")],
)
@pytest.mark.sweep(every=4)
def test_real_adapters_on_a_cpu_take_what_is_predicted(
    method: Any, targets: str, checkpointing: Any, tmp_path: Path
) -> None:
    peft, transformers = import_module("peft"), import_module("transformers")
    widths = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"num_hidden_layers": 4, "vocab_size": 2000, "max_position_embeddings": 512}
    config = transformers.LlamaConfig(**widths, **sizes, use_cache=False, architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    work = WorkOptions(seq_len=128, precision="fp32", method=method, lora_rank=16, lora_targets=targets)
    cluster = resolve_cluster(HardwareRequest(gpu="cpu", gpus=1))
    request = make_request(resolve_model(str(tmp_path / "config.json")), cluster, work)
    phases = phases_of(job_of(*exact(request, ExactOptions(micro_batch=4, checkpointing=checkpointing))))
    wanted = "all-linear" if targets == "all-linear" else targets.split(",")
    lora = peft.LoraConfig(r=16, target_modules=wanted, use_dora=method == "dora")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config).train(), lora)
    if checkpointing == "full":
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable()
    tokens = torch.randint(2000, (4, 128))
    taken = measured(model, {"input_ids": tokens, "labels": tokens})
    predicted = max(phases[name].total for name in ("forward", "loss", "backward", "step"))
    assert predicted == pytest.approx(taken, rel=0.06)
