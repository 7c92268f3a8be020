"""Questions that people ask a hardware selector, in a script and on the command line, as docs/reference/calls.md has
them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dsplan
from dsplan import HardwareSelector, mpi
from dsplan.exact.factory import any_model
from planner.cost.inference import cached_values_per_sequence, possible_counts, serving_on
from planner.errors import NothingFits
from strategies.tracing.live import facts_from_module
from tests.dsplan.cli import Cli

OPT = {"model_family": "text_generation", "model_name": "facebook/opt-1.3b"}
GPU = "A100-SXM4-80GB"
TOKENS = 24


def test_no_gpus_means_the_processor() -> None:
    selector = HardwareSelector()
    config = selector.get_distributed_training_config(
        "text_generation", "facebook/opt-125m", gpu_count=0, batch_size=1, max_memory_gb=24
    )
    assert (config["hardware"], config["gpu_count"], config["global_batch_size"]) == ("cpu", 1, 1)
    assert config["mixed_precision"] is False
    result = selector.select_hardware_for_task(
        "text_generation", "facebook/opt-125m", task_type="training", batch_size=1, distributed=True, gpu_count=0
    )
    assert result["primary_recommendation"] == "1 x cpu"


@pytest.mark.parametrize("task", ["training", "inference", "config"])
def test_answers_are_json(task: str) -> None:
    selector = HardwareSelector(gpu=GPU, optimizer="adafactor")
    if task == "config":
        answer: dict[str, Any] = selector.get_distributed_training_config(
            **OPT, gpu_count=4, batch_size=8, max_memory_gb=24
        )
        assert answer["deepspeed_config"].get("zero_stage", 1) in (1, 2, 3)
        assert answer.get("fsdp_config", {}) == {}
    else:
        answer = selector.select_hardware_for_task(**OPT, task_type=task, batch_size=8, gpu_count=4)
        assert answer["fallback_options"]
    assert json.loads(json.dumps(answer)) == answer


def tiny(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of transformers, and the inputs that leave a cache of TOKENS tokens."""
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, TOKENS))
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32)
        ), {"input_ids": ids}
    if kind == "llama":
        settings = transformers.LlamaConfig(**small, num_key_value_heads=2, intermediate_size=64)
        return transformers.LlamaForCausalLM(settings), {"input_ids": ids}
    if kind == "mistral":
        settings = transformers.MistralConfig(**small, num_key_value_heads=2, intermediate_size=64, sliding_window=9)
        return transformers.MistralForCausalLM(settings), {"input_ids": ids}
    settings = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4
    )
    return transformers.T5ForConditionalGeneration(settings), {"input_ids": ids, "decoder_input_ids": ids}


def cached_numbers(cache: Any) -> int:
    """Return what a cache of transformers really holds."""
    if hasattr(cache, "self_attention_cache"):
        return cached_numbers(cache.self_attention_cache) + cached_numbers(cache.cross_attention_cache)
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "t5"])
def test_the_cache_is_as_large_as_transformers_own(kind: str) -> None:
    model, inputs = tiny(kind)
    with torch.no_grad():
        cache = model.eval()(**inputs, use_cache=True).past_key_values
    held = cached_numbers(cache)
    if kind == "mistral":
        held = held * 9 // 8  # transformers leaves the window's oldest token out, which the next one does not see
    assert cached_values_per_sequence(facts_from_module(model), TOKENS) == (held, 0)


def test_gpus_to_serve() -> None:
    """Figures by hand: 32 layers x 2 x 4096 x 4096 tokens x 2 bytes; 61 layers x (512 + 64) x 4096 tokens x 2 bytes."""
    one = {"capacity_bytes": 80 * 2**30, "tokens": 4096, "sequences": 4, "bytes_per_value": 2}
    llama = serving_on(any_model("llama-2-7b"), 2, **one)
    assert (llama.cache_bytes_per_sequence, llama.cache_bytes) == (2**30, 4 * 2**30)
    assert llama.weights_bytes == 6_738_415_616
    assert llama.most_sequences == (72 * 2**30 - llama.weights_bytes) // 2**30
    latent = serving_on(any_model("deepseek-ai/DeepSeek-V3"), 32, **one)
    assert latent.cache_bytes_per_sequence == 61 * 576 * 4096 * 2
    grouped = [serving_on(any_model("meta-llama/Llama-3.1-70B"), gpus, **one) for gpus in (8, 16)]
    assert grouped[0].cache_bytes == grouped[1].cache_bytes, "8 key-value heads lie twice on 16 GPUs"
    assert possible_counts(any_model("meta-llama/Llama-3.1-70B"), 8) == (1, 2, 4, 8)


def test_serving_takes_the_fewest_gpus_that_hold_it() -> None:
    selector = HardwareSelector(gpu=GPU, sequence_length=8192)
    ask = {"model_family": "text_generation", "model_name": "meta-llama/Llama-3.1-70B", "task_type": "inference"}
    answer = selector.select_hardware_for_task(**ask, batch_size=8)
    assert (answer["gpu_count"], answer["primary_recommendation"]) == (4, f"4 x {GPU}")
    assert [option["gpu_count"] for option in answer["fallback_options"]] == [8]
    assert answer["most_sequences"] >= 8
    memory = answer["estimated_memory"]
    assert memory["per_gpu_gb"] == pytest.approx(memory["parameters_gb"] + memory["kv_cache_gb"])
    with pytest.raises(NothingFits, match=r"each of 2 would hold .* and has 71\.2 GiB for them; 1\) use 4 GPUs 2\)"):
        selector.select_hardware_for_task(**ask, batch_size=8, gpu_count=2)
    with pytest.raises(NothingFits, match=r"1\) serve \d+ sequences at a time 2\) set sequence_length="):
        selector.select_hardware_for_task(**ask, batch_size=10_000, gpu_count=8)


def test_command_lines(cli: Cli, tmp_path: Path) -> None:
    """`--model-name llama-7b --batch-size 16 --gpu-count 8`, a configuration generator, and lists of models."""
    answer = cli(f"recommend --model llama-7b --gpus 8 --gpu {GPU} --global-batch 128 --max-memory-gb 60 --json")
    assert answer.status == 0
    assert answer.json["plans"][0]["plan"]["global_batch_size"] == 128
    generated = cli(f"recommend --model-size 6B --gpus 32 --gpu {GPU} --global-batch 64 --out", tmp_path)
    assert generated.status == 0
    config = next(tmp_path.glob("plan-*/deepspeed/deepspeed.json"))
    assert json.loads(config.read_text())["train_batch_size"] == 64
    assert cli("models").out.count("\n") > 100


def test_names_on_the_page_are_there() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/calls.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`dsplan\.([A-Za-z_.]+)", page)) - {"mpi"}
    assert len(named) >= 8
    for name in named:
        value: Any = dsplan
        for part in name.split("."):
            value = getattr(value, part)
        assert callable(value)
    in_mpi = re.findall(r"^\| `(\w+)\(", page.partition("## On arrays")[2], re.MULTILINE)
    assert len(in_mpi) == 8
    assert set(in_mpi) <= set(mpi.__all__)
