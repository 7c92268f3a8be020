"""The key accesses of the training guide's snippets, over its models, GPU counts and memory limits."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from dsplan import HardwareSelector, plan
from dsplan.training_config import TrainingConfig
from planner.errors import NothingFits
from planner.search.ranking import NEVER_COMPARED
from planner.vocabulary import Optimizer

MODELS = ("facebook/opt-1.3b", "facebook/opt-6.7b", "facebook/opt-13b", "facebook/opt-30b")
CASES = list(itertools.product(MODELS, (1, 4, 8), (16, 24, 40), (1, 8)))


SHARDED_BY_ZERO = (("facebook/opt-1.3b", 4, 8, 28), ("facebook/opt-1.3b", 8, 8, 16), ("facebook/opt-6.7b", 8, 8, 60))
"""With Adafactor, which cannot step on FSDP's shards."""


@cache
def configuration(
    model: str, gpus: int, batch: int, limit: float | None, optimizer: Optimizer = "adamw"
) -> TrainingConfig:
    return HardwareSelector(gpu="A100-SXM4-80GB", optimizer=optimizer).get_distributed_training_config(
        model_family="text_generation", model_name=model, gpu_count=gpus, batch_size=batch, max_memory_gb=limit
    )


@pytest.mark.parametrize(("model", "gpus", "limit", "batch"), CASES)
@pytest.mark.sweep(every=6, suite=lambda gpus, batch, limit: (gpus == 1) == (batch == 1) and (gpus == 8 or limit == 24))
def test_every_key_the_guide_reads(model: str, gpus: int, limit: int, batch: int) -> None:
    config = configuration(model, gpus, batch, limit)
    steps = config.get("gradient_accumulation_steps", 1)
    assert config["gpu_count"] == gpus
    assert config["global_batch_size"] == batch * gpus
    assert config["per_gpu_batch_size"] * config["gpu_count"] * steps == batch * gpus
    assert config["mixed_precision"] is True
    assert isinstance(config["gradient_checkpointing"], bool)
    memory = config["estimated_memory"]
    for key in ("parameters_gb", "activations_gb", "optimizer_gb", "gradients_gb"):
        assert 0 <= memory[key] <= limit
    assert 0 < memory["per_gpu_gb"] <= memory["per_gpu_upper_gb"]
    assert memory["per_gpu_gb"] <= limit
    assert memory["per_gpu_needed_gb"] <= limit
    check_strategy(config)


@pytest.mark.parametrize(("model", "gpus", "batch", "limit"), SHARDED_BY_ZERO)
def test_the_keys_of_zero_where_fsdp_cannot_step(model: str, gpus: int, batch: int, limit: int) -> None:
    check_strategy(configuration(model, gpus, batch, limit, "adafactor"))


def check_strategy(config: TrainingConfig) -> None:
    strategy = config["distributed_strategy"]
    assert strategy in ("DDP", "FSDP", "DeepSpeed")
    assert ("deepspeed_config" in config) == (strategy == "DeepSpeed")
    assert ("fsdp_config" in config) == (strategy == "FSDP")
    if strategy == "DeepSpeed":
        section = config["deepspeed_config"]
        emitted = config.to_deepspeed_config()["zero_optimization"]
        assert section.get("zero_stage", 1) == emitted["stage"]
        assert section.get("offload_optimizer", False) is ("offload_optimizer" in emitted)
        assert section.get("offload_param", False) is ("offload_param" in emitted)
        assert config.to_deepspeed_config()["train_batch_size"] == config["global_batch_size"]
    if strategy == "FSDP":
        section = config["fsdp_config"]
        assert section.get("sharding_strategy") in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
        assert section.get("cpu_offload") is (config.plan.configuration.offload != "none")
        assert section.get("activation_checkpointing") is config["gradient_checkpointing"]
    arguments = config.to_training_arguments()
    assert arguments["per_device_train_batch_size"] == config["per_gpu_batch_size"]
    assert arguments["gradient_accumulation_steps"] == config["gradient_accumulation_steps"]


@pytest.mark.slow
def test_the_cases_meet_every_strategy_word() -> None:
    """Otherwise the checks above would not have been reached."""
    words = {configuration(model, gpus, 8, limit)["strategy"] for model, gpus, limit, _ in CASES if gpus == 8}
    words |= {configuration("facebook/opt-125m", 4, 8, None)["strategy"]}
    words |= {configuration(*case, "adafactor")["strategy"] for case in SHARDED_BY_ZERO}
    assert {"ddp", "fsdp", "zero1", "zero2", "zero3"} <= words


def test_basic_selection() -> None:
    result = HardwareSelector(gpu="A100-SXM4-80GB").select_hardware_for_task(
        model_family="text_generation",
        model_name="facebook/opt-1.3b",
        task_type="training",
        batch_size=8,
        distributed=True,
        gpu_count=4,
    )
    assert result["primary_recommendation"] == "4 x A100-SXM4-80GB"
    assert result["distributed_strategy"] in ("DDP", "FSDP", "DeepSpeed")
    assert result["gpu_count"] == 4
    assert result.plan is not None
    assert result.plan.configuration.global_batch_size == result["plan"]["plan"]["global_batch_size"] == 32
    fallback = result["fallback_options"]
    assert len(fallback) >= 2
    assert result["strategy"] not in [option["strategy"] for option in fallback]
    for option in fallback:
        samples = option["per_gpu_batch_size"] * option["gpu_count"] * option["gradient_accumulation_steps"]
        assert samples == 32
    assert "limited by" in result["explanation"]


@pytest.mark.parametrize("gpus", [1, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.sweep(every=2)
def test_more_memory_never_makes_the_plan_slower(gpus: int) -> None:
    for model in MODELS:
        seconds = [configuration(model, gpus, 8, limit).plan.time.step_seconds for limit in (16, 24, 40, 80)]
        for less, more in itertools.pairwise(seconds):
            # A simpler strategy that fits with more memory leads unless it is slower by more than this.
            assert more <= less * (1 + NEVER_COMPARED), (model, gpus, seconds)


def test_nothing_fits_names_the_closest_miss_and_remedies() -> None:
    with pytest.raises(NothingFits) as caught:
        configuration("facebook/opt-30b", 1, 1, 1)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("facebook/opt-30b does not fit on 1 x A100-SXM4-80GB: closest is ")
    assert "1) " in message
    with pytest.raises(NothingFits) as planned:
        plan(model="facebook/opt-30b", gpus=1, gpu="a100-80gb", max_memory_gb=1)
    assert str(planned.value).startswith("facebook/opt-30b does not fit on 1 x A100-SXM4-80GB: closest is ")
