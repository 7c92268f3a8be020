"""Checkpoints: whole or absent, readable under another strategy, and never a way to run code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import training_bodies
from training_bodies import Recipe

from hardware_db.spawn import RankPool
from strategies.checkpoint_origin import require_readable
from strategies.errors import BrokenFile


class Mischief:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


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


def test_the_same_step_can_be_saved_again(saved: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.load_checkpoint(saved)
    engine.save_checkpoint(saved, client_state={"epoch": 5})
    assert training_bodies.make_engine(Recipe()).load_checkpoint(saved)[1] == {"epoch": 5}


def test_a_save_that_dies_leaves_the_old_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.load_checkpoint(saved)
    training_bodies.one_step(engine, 1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BrokenFile, match=r"step-00000002: cannot be written \(No space left on device\); name another"):
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


def test_what_zero_wrote_is_refused_by_strategies_that_cannot_read_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(training_bodies.step_and_save, Recipe(strategy="zero2", world_size=2), str(tmp_path), 0)
    with pytest.raises(BrokenFile, match=r"single on 1 rank cannot resume it; resume with zero1 or zero2 on 2 ranks"):
        training_bodies.make_engine(Recipe()).load_checkpoint(tmp_path)
    refused = (Recipe(strategy="zero3", world_size=2), Recipe(strategy="zero2", world_size=4))
    for recipe in refused:
        with pytest.raises(BrokenFile, match="resume with zero1 or zero2 on 2 ranks"):
            require_readable(tmp_path, recipe.plan().configuration)
    require_readable(tmp_path, Recipe(strategy="zero1", world_size=2).plan().configuration)


def test_what_torch_wrote_is_refused_by_zero(saved: Path) -> None:
    with pytest.raises(BrokenFile, match="resume with single or ddp or fsdp"):
        require_readable(saved, Recipe(strategy="zero1", world_size=2).plan().configuration)
    require_readable(saved, Recipe(strategy="fsdp", world_size=4).plan().configuration)


def test_metadata_that_would_run_code_is_refused(saved: Path, tmp_path: Path) -> None:
    (saved / "step-00000001" / ".metadata").write_bytes(pickle.dumps(Mischief(tmp_path / "owned")))
    with pytest.raises(BrokenFile, match=r"it asks for posix\.mkdir"):
        training_bodies.make_engine(Recipe()).load_checkpoint(saved)
    assert not (tmp_path / "owned").exists()


def test_values_that_would_run_code_are_refused(tmp_path: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    training_bodies.one_step(engine, 0)
    engine.optimizer.param_groups[0]["lr"] = Mischief(tmp_path / "owned")
    engine.save_checkpoint(tmp_path / "run")
    with pytest.raises(BrokenFile, match="more than plain values"):
        training_bodies.make_engine(Recipe()).load_checkpoint(tmp_path / "run")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("damage", ["cut", "missing", "not a checkpoint"])
def test_damaged_checkpoints_are_named(saved: Path, damage: str) -> None:
    state = saved / "step-00000001" / "state.json"
    if damage == "cut":
        state.write_text(state.read_text()[:-20])
    elif damage == "missing":
        state.unlink()
    else:
        state.write_text(json.dumps({"progress": {}}))
    with pytest.raises(BrokenFile, match="name an earlier step") as caught:
        training_bodies.make_engine(Recipe()).load_checkpoint(saved)
    assert str(state) in str(caught.value)


def test_a_checkpoint_of_another_model(saved: Path) -> None:
    engine = training_bodies.make_engine(Recipe())
    engine.module.extra = torch.nn.Linear(3, 3)
    with pytest.raises(BrokenFile, match=r"Missing key .*extra") as caught:
        engine.load_checkpoint(saved)
    assert "\n" not in str(caught.value)


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
