"""The TrainingArguments JSON, taken by transformers and trained with on two ranks."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner.emit import EmitOptions, emit
from planner.emit.huggingface import training_arguments
from planner.types.plan import Plan
from tests.planner.emit.consumers import ask, launch, write
from tests.planner.emit.plans import TINY, make_plan

NAMES = {
    "adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused", "adamw-forloop": "adamw_torch", "sgd": "sgd",
    "adamw-8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "lion": "lion_32bit",
}  # fmt: skip


def grid() -> list[Plan]:
    plans = []
    precisions = ("fp32", "bf16", "fp16", "bf16-pure")
    for precision, optimizer, level in itertools.product(precisions, NAMES, ("none", "full")):
        words = {"precision": precision, "optimizer": optimizer, "activation_checkpointing": level}
        for strategy in ("single", "ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3"):
            plans.append(make_plan(strategy, **words))
    plans += [make_plan("fsdp", offload="all"), make_plan("zero2", offload="optimizer")]
    return [*plans, make_plan("zero3", offload="all"), make_plan("zero3", offload="nvme")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what one process of transformers' took the arguments of the grid for, and last those of a CPU plan."""
    # use_cpu, because transformers refuses bf16 where it sees no GPU; no name of a process group, because it looks for
    # one then, and this process is alone: tests/strategies/cuda/test_frameworks.py makes the group.
    question = [{**training_arguments(plan), "use_cpu": True} for plan in grid()]
    for arguments in question:
        arguments.pop("ddp_backend", None)
    question.append(training_arguments(make_plan("ddp", gpus=2), EmitOptions(cpu=True)))
    answers: list[dict[str, Any]] = ask("huggingface_parse.py", question, directory=tmp_path_factory.mktemp("parsed"))
    return answers


def test_transformers_takes_the_arguments_of_every_plan(answers: list[dict[str, Any]]) -> None:
    for plan, answer in zip(grid(), answers[:-1], strict=True):
        configuration = plan.configuration
        sharded = configuration.strategy.startswith("fsdp")
        recomputes = configuration.activation_checkpointing == "full"
        narrow = {"bf16": "bf16", "fp16": "fp16", "bf16-pure": "bf16" if configuration.zero_stage else "no"}
        assert answer["micro_batch"] == configuration.micro_batch_size
        assert answer["accumulation"] == configuration.gradient_accumulation_steps
        assert answer["precision"] == narrow.get(configuration.precision, "no")
        assert answer["optimizer"] == NAMES[configuration.optimizer]
        assert answer["checkpointing"] == (recomputes and not sharded)
        assert answer["stage"] == configuration.zero_stage
        if sharded:
            fsdp = answer["fsdp"]
            assert fsdp["fsdp_version"] == 2
            assert fsdp["reshard_after_forward"] == (configuration.strategy == "fsdp")
            assert fsdp["activation_checkpointing"] == recomputes
            assert fsdp.get("cpu_offload", False) == (configuration.offload == "all")
            assert fsdp["transformer_cls_names_to_wrap"] == "OPTDecoderLayer"


def test_a_cpu_plan_says_use_cpu(answers: list[dict[str, Any]]) -> None:
    plan = make_plan("ddp", gpus=2)
    assert "use_cpu" not in training_arguments(plan)
    arguments = training_arguments(plan, EmitOptions(cpu=True))
    assert arguments["use_cpu"] is True
    assert arguments == training_arguments(make_plan("ddp", gpus=2, vendor="cpu"))
    assert answers[-1]["device"] == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "wrapper"), [("ddp", "DistributedDataParallel"), ("zero2", "DeepSpeedEngine")])
def test_trainer_trains_with_what_was_emitted(strategy: str, wrapper: str, tmp_path: Path) -> None:
    plan = make_plan(strategy, gpus=2, vendor="cpu", model=TINY, precision="fp32", gradient_accumulation_steps=2)
    options = EmitOptions(learning_rate=1e-2)
    files = emit(plan, "huggingface", options)
    write(files, tmp_path)
    assert json.loads(files["training_arguments.json"]) == training_arguments(plan, options)
    script = shlex.quote(str(Path(__file__).parent / "huggingface_rank.py"))
    ranks = launch(["bash", "-c", f"bash torchrun.sh {script}"], directory=tmp_path)
    assert [rank["wrapper"] for rank in ranks] == [wrapper, wrapper]
    assert [rank["world"] for rank in ranks] == [2, 2]
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0]
