"""The DeepSpeed JSON, read by DeepSpeed's own config class and trained with by its engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from planner.emit import EmitOptions
from planner.emit.deepspeed import deepspeed_config
from planner.types.plan import Plan
from tests.planner.emit.consumers import ask
from tests.planner.emit.plans import TINY, make_plan

STATES = ("none", "optimizer")
OFFLOADS = {"zero1": STATES, "zero2": STATES, "zero3": (*STATES, "all", "nvme")}


def grid() -> list[Plan]:
    words = itertools.product(
        ("fp32", "bf16", "fp16"),
        ("adamw", "adamw-fused", "adamw-forloop", "adamw-8bit", "sgd", "adafactor", "lion"),
        ("none", "full"),
    )
    plans = []
    for precision, optimizer, checkpointing in words:
        chosen = {"precision": precision, "optimizer": optimizer, "activation_checkpointing": checkpointing}
        plans += [make_plan(strategy, **chosen) for strategy in ("single", "ddp")]
        plans += [make_plan(stage, offload=place, **chosen) for stage, places in OFFLOADS.items() for place in places]
    return plans + [make_plan(strategy, precision="bf16-pure") for strategy in OFFLOADS]


def test_deepspeed_understands_every_plan_as_it_was_meant(tmp_path: Path) -> None:
    plans = grid()
    question = [[plan.configuration.world_size, deepspeed_config(plan)] for plan in plans]
    answers = ask("deepspeed_parse.py", question, directory=tmp_path)
    assert len(answers) == len(plans) == 423
    for plan, answer in zip(plans, answers, strict=True):
        configuration = plan.configuration
        zero, narrow = configuration.zero_stage > 0, configuration.precision != "fp32"
        devices = {"none": (None, None), "optimizer": ("cpu", None), "all": ("cpu", "cpu"), "nvme": ("nvme", "nvme")}
        assert answer["batch"] == [configuration.global_batch_size, configuration.micro_batch_size]
        assert answer["accumulation"] == configuration.gradient_accumulation_steps
        assert answer["stage"] == configuration.zero_stage
        assert answer["bf16"] == (zero and configuration.precision.startswith("bf16"))
        assert answer["fp16"] == (zero and configuration.precision == "fp16")
        assert answer["autocast"] == (narrow and not zero)
        assert (answer["offload_optimizer"], answer["offload_param"]) == devices[configuration.offload]
        assert answer["unknown"] == []


CPU = {"gpus": 1, "vendor": "cpu", "model": TINY, "gradient_accumulation_steps": 1}
TRAINED = [
    ("ddp", {"precision": "fp32"}),
    ("ddp", {"precision": "bf16"}),
    ("zero1", {"precision": "fp32"}),
    ("zero2", {"precision": "fp32", "optimizer": "adamw-fused"}),
    ("zero3", {"precision": "fp32", "optimizer": "adamw-forloop"}),
    ("zero3", {"precision": "fp32", "offload": "optimizer"}),
    ("zero3", {"precision": "fp32", "offload": "all"}),
    ("zero2", {"precision": "bf16"}),
    ("zero2", {"precision": "bf16-pure"}),
    ("zero2", {"precision": "fp32", "optimizer": "sgd"}),
    ("zero2", {"precision": "fp32", "optimizer": "adafactor"}),
]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses under each of them, in one process."""
    options = EmitOptions(learning_rate=1e-3)
    configs = [deepspeed_config(make_plan(strategy, **CPU, **words), options) for strategy, words in TRAINED]
    losses: list[list[float]] = ask("deepspeed_train.py", configs, directory=tmp_path_factory.mktemp("trained"))
    return losses


@pytest.mark.parametrize("row", range(len(TRAINED)))
def test_deepspeed_trains_with_the_configs_of_a_cpu_machine(row: int, histories: list[list[float]]) -> None:
    (_, words), losses = TRAINED[row], histories[row]
    if not losses:
        pytest.skip(f"DeepSpeed has no {words['precision']} on this machine")
    assert losses[-1] < losses[0]
    if words["precision"] == "fp32" and str(words.get("optimizer", "adamw")).startswith("adamw"):
        assert losses == pytest.approx(histories[0], rel=1e-5)


def test_a_batch_that_does_not_match_the_world_is_refused_by_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        ask("deepspeed_parse.py", [[4, deepspeed_config(make_plan("zero2", gpus=8))]], directory=tmp_path)


def test_buckets_never_exceed_a_small_model() -> None:
    section = deepspeed_config(make_plan("zero2", model=TINY))["zero_optimization"]
    assert isinstance(section, dict)
    assert section["reduce_bucket_size"] == section["allgather_bucket_size"] == TINY["parameters"]


def test_stage_3_takes_the_sizes_transformers_takes_for_auto() -> None:
    section = deepspeed_config(make_plan("zero3"))["zero_optimization"]
    assert isinstance(section, dict)
    assert section["reduce_bucket_size"] == 4096**2
    assert section["stage3_prefetch_bucket_size"] == int(0.9 * 4096**2)
    assert section["stage3_param_persistence_threshold"] == 10 * 4096


def test_a_swap_buffer_holds_one_rank_of_the_embedding() -> None:
    vast = {"hidden_size": 16384, "vocab_size": 256_000, "parameters": 10**12, "name": "vast"}
    section = deepspeed_config(make_plan("zero3", model=vast, offload="nvme", gpus=8))["zero_optimization"]
    assert isinstance(section, dict)
    assert section["offload_param"]["buffer_size"] == 256_000 * 16384 // 8
