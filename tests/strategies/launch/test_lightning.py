"""A Lightning script, which knows nothing of dsplan, under `dsplan run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.launch.command import run

pytest.importorskip("lightning")
SCRIPT = Path(__file__).with_name("lightning_script.py")


def _trained(directory: Path, name: str, word: str, *options: str) -> tuple[dict[tuple[int, int], float], Any]:
    """The loss of rank 1's batches by epoch and place, and the command's answer."""
    finished = run(*options, "--json", SCRIPT, str(directory / name), word, cwd=directory)
    assert finished.status == 0, finished.err
    rows = map(json.loads, (directory / f"{name}.losses1").read_text().splitlines())
    return {(epoch, index): loss for epoch, index, loss in rows}, finished.json


@pytest.mark.slow
def test_every_strategy_trains_alike_and_a_killed_run_makes_the_same_steps(tmp_path: Path) -> None:
    expected, answer = _trained(tmp_path, "free", "quiet")
    assert len(expected) == 16
    assert answer["plan"]["plan"]["gradient_accumulation_steps"] == 2
    for strategy in ("ddp", "fsdp", "zero2", "zero3"):
        losses, answer = _trained(tmp_path, strategy, "quiet", "--strategy", strategy)
        assert answer["plan"]["plan"]["strategy"] == strategy
        assert losses == pytest.approx(expected, abs=1e-5)
    for strategy in ("fsdp", "zero2"):
        options = ("--strategy", strategy, "--checkpoint-steps", "1")
        losses, answer = _trained(tmp_path, f"{strategy}-killed", "faulty", *options)
        assert [item["ending"]["kind"] for item in answer["attempts"] if item["ending"]] == ["killed"]
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_plans_strategy_takes_the_place_of_the_scripts(ranks: RankPool) -> None:
    for figures in ranks.run(taken_place):
        assert figures == {
            "strategies": ["LightningStrategy", "LightningStrategy", "FabricStrategy"],
            "is_the_scripts_own": [False, True, False],
            "devices": [2, 2, 2],
            "sizes": [2, 2, 2],
            "shared": [1.0, 1.0],
        }


def taken_place() -> dict[str, list[Any]]:
    """Return what `dsplan run` makes a Trainer, one with dsplan's strategy already, and a Fabric of a script with."""
    import lightning.fabric
    import lightning.pytorch

    from dsplan.integrations import LightningStrategy
    from strategies.launch.hooks.lightning import fabric_, trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    own = LightningStrategy("zero1", backend="native")
    trainers: list[Any] = []
    for given in ({"strategy": "ddp_spawn", "devices": 7, "num_nodes": 2}, {"strategy": own, "accelerator": "auto"}):
        trainers.append(lightning.pytorch.Trainer.__new__(lightning.pytorch.Trainer))
        trainer(lightning.pytorch.Trainer.__init__, trainers[-1], **given, **quiet)
    trainers.append(lightning.fabric.Fabric.__new__(lightning.fabric.Fabric))
    fabric_(lightning.fabric.Fabric.__init__, trainers[-1], strategy="deepspeed", devices=3, accelerator="cpu")
    return {
        "strategies": [type(item.strategy).__name__ for item in trainers],
        "is_the_scripts_own": [item.strategy is own for item in trainers],
        "devices": [item.strategy.num_processes for item in trainers],
        "sizes": [item.world_size for item in trainers],
        "shared": trainers[-1].all_gather(torch.ones(1)).flatten().tolist(),  # in a script that does not call `launch`
    }
