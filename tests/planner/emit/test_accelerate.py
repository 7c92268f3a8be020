"""The accelerate YAML, read by accelerate's loader and launcher, and launched."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from planner.emit import emit
from planner.types.plan import Plan
from tests.planner.emit.consumers import ask, launch, write
from tests.planner.emit.plans import TINY, make_plan


def grid() -> list[Plan]:
    plans = []
    for precision in ("fp32", "bf16", "fp16", "bf16-pure"):
        for level in ("none", "full", "selective"):
            words = {"precision": precision, "activation_checkpointing": level}
            plans += [make_plan(strategy, **words) for strategy in ("single", "ddp")]
            plans += [make_plan("ddp", gpus=16, nodes=2, **words)]
            for strategy in ("fsdp", "fsdp-grad-op"):
                plans += [make_plan(strategy, offload=offload, **words) for offload in ("none", "all")]
            plans += [make_plan("hsdp", gpus=16, nodes=2, dp_replicate=2, dp_shard=8, **words)]
            plans += [make_plan("fsdp-grad-op", gpus=16, nodes=2, dp_replicate=4, dp_shard=4, **words)]
            plans += [make_plan("fsdp", dp_shard=4, tp=2, **words)]
            plans += [make_plan("fsdp", dp_shard=2, cp=2, tp=2, **words), make_plan("fsdp", dp_shard=1, cp=8, **words)]
            split = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
            plans += [make_plan("hsdp", gpus=16, nodes=2, **split, **words)]
            plans += [make_plan(strategy, **words) for strategy in ("zero1", "zero2", "zero3")]
    plans += [make_plan("zero2", offload="optimizer"), make_plan("zero3", offload="all")]
    plans += [
        replace(make_plan(name, precision="fp8"), workload={"fp8_recipe": "tensorwise"}) for name in ("ddp", "fsdp")
    ]
    plans += [replace(make_plan("fsdp", precision="fp8"), workload={"fp8_recipe": "mxfp8"})]
    return [*plans, make_plan("zero3", offload="nvme")]


def test_accelerate_understands_every_plan_as_it_was_meant(tmp_path: Path) -> None:
    plans = grid()
    answers = ask("accelerate_parse.py", [emit(plan, "accelerate") for plan in plans], directory=tmp_path)
    for plan, answer in zip(plans, answers, strict=True):
        configuration = plan.configuration
        assert answer["processes"] == configuration.world_size
        assert answer["machines"] == plan.cluster["nodes"]
        if configuration.zero_stage:
            check_zero(plan, answer)
            continue
        named = configuration.precision if configuration.precision in ("bf16", "fp16") else "no"
        if configuration.precision == "fp8":
            converted = plan.workload["fp8_recipe"] == "tensorwise"
            named = "fp8" if converted else "bf16"
            assert answer["fp8"] == ("AO" if converted else None)
        assert answer["mixed_precision"] == named
        if configuration.strategy.startswith(("fsdp", "hsdp")):
            check_fsdp(plan, answer)
        else:
            assert answer["type"] == ("NO" if configuration.world_size == 1 else "MULTI_GPU")


def check_fsdp(plan: Plan, answer: dict[str, object]) -> None:
    configuration = plan.configuration
    meshed = configuration.dp_replicate * configuration.tp * configuration.cp > 1
    assert answer["type"] == "FSDP"
    assert answer["fsdp"] == {
        "version": 2,
        "reshard": configuration.strategy != "fsdp-grad-op",
        "offload": "CPUOffloadPolicy" if configuration.offload == "all" else "OffloadPolicy",
        "checkpointing": configuration.activation_checkpointing == "full",
        "blocks": ["OPTDecoderLayer"],
        "state_dict": "SHARDED_STATE_DICT",
        "mesh": [getattr(configuration, name) for name in ("dp_replicate", "dp_shard", "tp", "cp")] if meshed else None,
    }


def check_zero(plan: Plan, answer: dict[str, object]) -> None:
    configuration = plan.configuration
    devices = {"none": ["none", "none"], "optimizer": ["cpu", "none"], "all": ["cpu", "cpu"], "nvme": ["nvme", "nvme"]}
    assert answer["type"] == "DEEPSPEED"
    assert answer["zero"] == {
        "stage": configuration.zero_stage,
        "accumulation": configuration.gradient_accumulation_steps,
        "init": configuration.zero_stage == 3,
        "devices": devices[configuration.offload],
    }


@pytest.mark.slow
def test_accelerate_launch_starts_the_ranks_of_a_cpu_plan(tmp_path: Path) -> None:
    plan = make_plan("ddp", gpus=2, vendor="cpu", model=TINY, gradient_accumulation_steps=1)
    files = emit(plan, "accelerate")
    write(files, tmp_path)
    script = shlex.quote(str(Path(__file__).parent / "accelerate_rank.py"))
    command = files["accelerate.yaml"].splitlines()[0].removeprefix("# ").replace("train.py", script)
    ranks = launch(["bash", "-c", command], directory=tmp_path)
    same = {"world": 2, "device": "cpu", "precision": "bf16"}
    same |= {"type": "DistributedType.MULTI_CPU", "wrapper": "DistributedDataParallel"}
    assert ranks == [{"rank": rank, **same} for rank in range(2)]
