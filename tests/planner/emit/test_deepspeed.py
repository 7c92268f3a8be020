"""The DeepSpeed JSON, read by DeepSpeed's own config class and trained with by its engine."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from dsplan import HardwareSelector
from planner.emit import FORMATS, EmitOptions, emit
from planner.emit.deepspeed import deepspeed_config
from planner.errors import ContradictoryRequest
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
        plans += [make_plan(stage, offload=device, **chosen) for stage, places in OFFLOADS.items() for device in places]
    plans += [make_plan("zero3", **each) for each in ({"hpz_partition_size": 4}, ALL_OF_ZERO_PLUS)]
    return plans + [make_plan(strategy, precision="bf16-pure") for strategy in OFFLOADS]


ALL_OF_ZERO_PLUS: dict[str, Any] = {"hpz_partition_size": 8, "quantized_weights": True, "quantized_gradients": True}


MODELS = ("facebook/opt-125m", "facebook/opt-6.7b", "facebook/opt-30b", "t5-3b", "mixtral-8x7b", "bert-large-uncased")


def recommended_configs() -> list[list[Any]]:
    """Plans as the search makes them, rather than by hand, in every format; of those that DeepSpeed reads, its config
    and the ranks it is for."""
    selector = HardwareSelector(gpu="A100-SXM4-40GB")
    configs = []
    for model, gpus in zip(MODELS, itertools.cycle((8, 64))):
        plan = selector.get_distributed_training_config(None, model, gpu_count=gpus).plan
        files: dict[str, dict[str, str]] = {}
        for format in FORMATS:
            with suppress(ContradictoryRequest):
                files[format] = emit(plan, format)
        assert {"accelerate", "torchrun"} <= set(files), plan.configuration
        if "deepspeed" in files:
            config = json.loads(files["deepspeed"]["deepspeed.json"])
            configs.append([plan.configuration.dims.data_parallel, config])
    return configs


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


@dataclass(frozen=True)
class Answers:
    """The answers of one process of DeepSpeed's to all configs: importing it takes longer than reading them."""

    of_grid: list[dict[str, Any]]
    of_recommended: list[dict[str, Any]]
    of_another_world: dict[str, Any]
    losses: list[list[float]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    grid_configs = [[plan.configuration.world_size, deepspeed_config(plan)] for plan in grid()]
    configs = recommended_configs()
    options = EmitOptions(learning_rate=1e-3)
    question = {
        "parse": [*grid_configs, *configs, [4, deepspeed_config(make_plan("zero2", gpus=8))]],
        "train": [deepspeed_config(make_plan(strategy, **CPU, **words), options) for strategy, words in TRAINED],
    }
    answer = ask("deepspeed_reads.py", question, directory=tmp_path_factory.mktemp("deepspeed"))
    *parsed, another = answer["parse"]
    return Answers(
        of_grid=parsed[: len(grid_configs)],
        of_recommended=parsed[len(grid_configs) :],
        of_another_world=another,
        losses=answer["train"],
    )


def test_deepspeed_understands_every_plan_as_it_was_meant(answers: Answers) -> None:
    plans = grid()
    assert len(plans) == 425
    for plan, answer in zip(plans, answers.of_grid, strict=True):
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
        chosen = [configuration.hpz_partition_size, configuration.quantized_weights, configuration.quantized_gradients]
        assert answer["zero_plus"] == chosen
        assert answer["unknown"] == []


def test_every_recommended_plan_has_a_config_that_a_trainer_reads(answers: Answers) -> None:
    assert len(answers.of_recommended) >= 3
    assert all(answer["unknown"] == [] for answer in answers.of_recommended)


@pytest.mark.parametrize("row", range(len(TRAINED)))
def test_deepspeed_trains_with_the_configs_of_a_cpu_machine(row: int, answers: Answers) -> None:
    (_, words), losses = TRAINED[row], answers.losses[row]
    if not losses:
        pytest.skip(f"DeepSpeed has no {words['precision']} on this machine")
    assert losses[-1] < losses[0]
    if words["precision"] == "fp32" and str(words.get("optimizer", "adamw")).startswith("adamw"):
        assert losses == pytest.approx(answers.losses[0], rel=1e-5)


def test_a_batch_that_does_not_match_the_world_is_refused_by_deepspeed(answers: Answers) -> None:
    assert "train_batch_size is not equal" in answers.of_another_world["refused"]


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
