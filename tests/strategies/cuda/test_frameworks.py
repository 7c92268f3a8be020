"""Frameworks train on cards with what dsplan emits as plain torch does on the CPU, and go on from their own saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardware_db.files import provide_torch_extensions
from tests.emulated_cuda.fixtures import CardPool
from tests.strategies import profile_bodies

Cases = dict[str, tuple[str, str, dict[str, Any]]]
SCRIPT = Path(__file__).with_name("framework_ranks.py")
_TOLERANCES = {"bf16": 1e-2, "bf16-pure": 1e-2, "fp16": 5e-4}


def _train(world_size: int, cases: Cases, cards: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return what the ranks of a process each, with a card each, answer."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    answer = folder / "answer.json"
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths), **cards}
    provide_torch_extensions(variables)
    command = [str(SCRIPT), str(answer), json.dumps(cases)]
    if world_size == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        variables |= alone
    else:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size), *command]
    finished = subprocess.run([sys.executable, *command], env=variables, cwd=folder, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-6000:]
    answers: dict[str, Any] = json.loads(answer.read_text())
    return answers


def _check(cases: Cases, answers: Mapping[str, Any]) -> None:
    expected = answers["plain"]["losses"]
    assert len(set(expected)) == len(expected)
    for name, (_, _, changes) in cases.items():
        close = pytest.approx(expected, rel=_TOLERANCES.get(changes.get("precision", "fp32"), 1e-6))
        assert answers[name]["losses"] == close, name
        assert answers[name]["resumed"] == close, name


@pytest.mark.slow
def test_trainer_takes_what_is_emitted_for_cards(cuda_environment: Mapping[str, str], tmp_path: Path) -> None:
    # Beside FSDP's own recomputation Trainer refuses its own, which these arguments ask for by default. The norm of
    # gradients that are offloaded is reduced over ranks on the CPU.
    cases: Cases = {"fsdp": ("trainer", "fsdp", {"activation_checkpointing": "full", "offload": "all"})}
    _check(cases, _train(1, cases, cuda_environment, tmp_path))


_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    # The process group is made for the first case, and the others' can be less.
    "fsdp offload": ("fsdp", {"offload": "all"}),
    "ddp": ("ddp", {}),
    "ddp full": ("ddp", {"activation_checkpointing": "full"}),
    "fsdp": ("fsdp", {}),
    "fsdp bf16": ("fsdp", {"precision": "bf16"}),
    "fsdp full": ("fsdp", {"activation_checkpointing": "full"}),
    "fsdp grad-op": ("fsdp-grad-op", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero2 bf16": ("zero2", {"precision": "bf16"}),
    "zero2 fp16": ("zero2", {"precision": "fp16"}),
    "zero2 offload": ("zero2", {"offload": "optimizer"}),
    "zero3": ("zero3", {}),
    "zero3 bf16": ("zero3", {"precision": "bf16"}),
    "zero3 fp16": ("zero3", {"precision": "fp16"}),
    "zero3 pure": ("zero3", {"precision": "bf16-pure"}),
    "zero3 full": ("zero3", {"activation_checkpointing": "full"}),
    "zero3 offload": ("zero3", {"offload": "all"}),
    # DeepSpeed's autocast stays on for the engines that its process makes later.
    "ddp bf16": ("ddp", {"precision": "bf16"}),
    "ddp fp16": ("ddp", {"precision": "fp16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["trainer", "accelerate", "deepspeed"])
def test_two_cards_train_alike_under_every_strategy(
    framework: str, cuda_environment: Mapping[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    cases: Cases = {
        name: (framework, *case)
        for name, case in _STRATEGIES.items()
        if framework != "deepspeed" or not case[0].startswith("fsdp")
    }
    _check(cases, _train(2, cases, cuda_environment, tmp_path))


@pytest.mark.slow
def test_a_profile_on_a_card_writes_nothing_to_standard_error(card: CardPool, tmp_path: Path) -> None:
    [(files, stderr)] = card.run(profile_bodies.profile_on_card, tmp_path)
    assert sorted(files) == ["profile-rank0.memory.pickle", "profile-rank0.trace.json"]
    assert stderr == ""
