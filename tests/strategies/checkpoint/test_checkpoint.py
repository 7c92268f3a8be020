"""Checkpoints: whole or absent, of the same model and optimizer, and readable under another strategy."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint.outbox import sizes_of_files
from strategies.errors import BrokenFile
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint after one step, `step-00000001` below this folder."""
    engine = training_bodies.make_engine(Recipe())
    training_bodies.one_step(engine, 0)
    assert engine.save_checkpoint(tmp_path / "run", client_state={"epoch": 4}) == tmp_path / "run" / "step-00000001"
    return tmp_path / "run"


def test_a_checkpoint_is_found_through_latest(saved: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    assert engine.load_checkpoint(saved) == (saved / "step-00000001", {"epoch": 4})
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-00000001"]


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert training_bodies.make_engine(Recipe()).load_checkpoint(tmp_path / "none") == (None, {})


def test_a_checkpoint_that_is_not_there_is_no_fresh_start(saved: Path) -> None:
    with pytest.raises(BrokenFile, match=r"step-00000099: is not there; there are: step-0"):
        training_bodies.make_engine(Recipe()).load_checkpoint(saved / "step-00000099")


def test_a_directory_without_checkpoints_is_said_to_be_one(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert training_bodies.make_engine(Recipe()).load_checkpoint(tmp_path / "none") == (None, {})
    assert f"dsplan: {tmp_path / 'none'} has no checkpoint: training starts anew" in capfd.readouterr().err
    near = saved.with_name(saved.name[:-1] + "x")
    training_bodies.make_engine(Recipe()).load_checkpoint(near)
    assert f"{near} has no checkpoint ({saved.name} beside it has)" in capfd.readouterr().err


def test_the_same_step_can_be_saved_again(saved: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.load_checkpoint(saved)
    assert engine.save_checkpoint(saved, client_state={"epoch": 5}) == saved / "step-00000001-2"
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step-00000001-2"]
    assert training_bodies.make_engine(Recipe()).load_checkpoint(saved)[1] == {"epoch": 5}


def test_a_save_that_dies_leaves_the_old_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.load_checkpoint(saved)
    training_bodies.one_step(engine, 1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    line = r"step-00000002: cannot be written \(No space left on device\); make room, or name another directory"
    with pytest.raises(BrokenFile, match=line):
        engine.save_checkpoint(saved)
    monkeypatch.undo()
    assert training_bodies.make_engine(Recipe()).load_checkpoint(saved)[0] == saved / "step-00000001"


def test_single_reads_what_fsdp_wrote_and_the_reverse(ranks: RankPool, tmp_path: Path) -> None:
    sharded, alone = Recipe(strategy="fsdp", world_size=2), Recipe()
    expected = ranks.run(training_bodies.step_and_save, sharded, str(tmp_path / "sharded"), 3)[0]
    engine = training_bodies.make_engine(alone)
    engine.load_checkpoint(tmp_path / "sharded")
    assert [training_bodies.one_step(engine, 3)] == pytest.approx(expected, rel=1e-5)
    engine.save_checkpoint(tmp_path / "whole")
    resumed = ranks.run(training_bodies.load_and_step, sharded, str(tmp_path / "whole"), 4)[0]
    assert resumed == pytest.approx(training_bodies.one_step(engine, 4), rel=1e-5)


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a checkpoint was unpickled")

    engine = training_bodies.make_engine(Recipe())
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    engine.load_checkpoint(saved)
    kinds = {path.suffix for path in (saved / "step-00000001").iterdir()}
    assert kinds == {".json", ".safetensors"}


@pytest.mark.parametrize("name", ["state.json", "tensors.json", "rank-00000.safetensors", "checksums.json"])
@pytest.mark.parametrize("damage", ["a flipped bit", "cut", "missing"])
@pytest.mark.sweep(every=2)
def test_damaged_checkpoints_are_named_with_the_newest_that_is_whole(saved: Path, damage: str, name: str) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.load_checkpoint(saved)
    training_bodies.one_step(engine, 1)
    file = engine.save_checkpoint(saved) / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[2 * len(content) // 3] ^= 16
        file.write_bytes(content)
    with pytest.raises(BrokenFile) as caught:
        training_bodies.make_engine(Recipe()).load_checkpoint(saved)
    assert str(caught.value).startswith(f"{file}: ")
    good = saved / "step-00000001"
    assert str(caught.value).endswith(f"load {good}, the newest that is whole")
    assert "\n" not in str(caught.value)
    assert training_bodies.make_engine(Recipe()).load_checkpoint(good)[0] == good


def test_a_checkpoint_of_another_model(saved: Path) -> None:
    def refusal_of(engine: Any) -> str:
        with pytest.raises(BrokenFile) as caught:
            engine.load_checkpoint(saved)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    wider, smaller, other = (training_bodies.make_engine(Recipe()) for _ in range(3))
    wider.module.extra = torch.nn.Linear(3, 3)
    assert "has no weight extra.weight" in refusal_of(wider)
    del smaller.module.blocks[2]
    assert "has a weight blocks.2.norm.weight that the model has not" in refusal_of(smaller)
    other.module.positions = torch.nn.Parameter(torch.zeros(2, 2))
    assert "has positions as [6, 16] and the model as [2, 2]" in refusal_of(other)


def test_a_checkpoint_of_another_optimizer(saved: Path) -> None:
    engine, *_ = training_bodies.initialize(
        model=training_bodies.TinyModel(), plan=Recipe().plan(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    with pytest.raises(BrokenFile, match="was trained with optimizer AdamW, not SGD; resume with AdamW"):
        engine.load_checkpoint(saved)


def test_the_scheduler_and_the_scaler_resume(tmp_path: Path) -> None:
    def make() -> tuple[object, torch.optim.lr_scheduler.LRScheduler]:
        engine, _, _, scheduler = training_bodies.initialize(
            model=training_bodies.TinyModel(),
            plan=Recipe(precision="fp16", accumulation=3).plan(),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        )
        assert scheduler is not None
        return engine, scheduler

    engine, scheduler = make()
    for step in range(3):
        training_bodies.one_step(engine, step)
    assert scheduler.get_last_lr() == [0.0005], "stepped once per optimizer step, not per micro-batch"
    engine.save_checkpoint(tmp_path)
    fresh, fresh_scheduler = make()
    fresh.load_checkpoint(tmp_path)
    assert fresh_scheduler.state_dict() == scheduler.state_dict()
    assert fresh.optimizer.param_groups[0]["lr"] == 0.0005


def test_a_file_that_another_rank_renames_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part-00001.json").write_text("{}")
    listed = [tmp_path / "part-00001.tmp", tmp_path / "part-00001.json"]
    monkeypatch.setattr(Path, "iterdir", lambda directory: iter(listed))
    assert sum(sizes_of_files(tmp_path).values()) == 2
