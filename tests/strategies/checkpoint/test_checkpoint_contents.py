"""The contents of a checkpoint beside weights and moments, how it is saved, and how it is exported."""

from __future__ import annotations

import random
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint import storage
from strategies.errors import BrokenFile, CannotRun
from tests.strategies import checkpoint_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

NATIVE = Recipe(strategy="zero3", backend="native", world_size=2)


@pytest.fixture
def engine() -> Any:
    trained = training_bodies.make_engine(Recipe())
    training_bodies.one_step(trained, 0)
    return trained


def engine_of(model: nn.Module, **parts: Any) -> Any:
    plan = Recipe().plan()
    return training_bodies.initialize(model=model, plan=plan, **parts)[0]


def test_random_numbers_continue(engine: Any, tmp_path: Path) -> None:
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(5)
    random.gauss(0, 1)
    engine.save_checkpoint(tmp_path)

    def numbers() -> list[float]:
        return [random.random(), random.gauss(0, 1), numpy.random.normal(), numpy.random.rand(), torch.rand(1).item()]

    expected = numbers()
    numbers()
    engine.load_checkpoint(tmp_path)
    assert numbers() == expected


def test_every_rank_has_random_numbers_of_its_own(ranks: RankPool, three_ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(checkpoint_bodies.random_numbers_after_saving, NATIVE, str(tmp_path))
    assert expected[0] != expected[1]
    assert ranks.run(checkpoint_bodies.random_numbers_after_loading, NATIVE, str(tmp_path)) == expected
    three = Recipe(strategy="ddp", world_size=3)
    drawn = three_ranks.run(checkpoint_bodies.random_numbers_after_loading, three, str(tmp_path))
    assert drawn[:2] == expected
    assert drawn[2] not in expected


def test_the_place_in_the_data_continues_on_more_ranks(ranks: RankPool, three_ranks: RankPool, tmp_path: Path) -> None:
    """In the middle of an epoch; the same samples whatever the number of ranks."""
    expected = ranks.run(checkpoint_bodies.batches_after_saving, NATIVE, str(tmp_path))
    three = Recipe(strategy="zero2", backend="native", world_size=3)
    read = three_ranks.run(checkpoint_bodies.batches_after_loading, three, str(tmp_path))
    steps = [[sorted(chain.from_iterable(step)) for step in zip(*batches, strict=True)] for batches in (read, expected)]
    assert steps[0] == steps[1]
    assert [len(set(step)) for step in steps[0]] == [12, 12]


def test_background_saving_keeps_what_was_when_it_was_called(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, original = threading.Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda *arguments: may_write.wait(20) and original(*arguments))
    expected = training_bodies.whole_parameters(engine)
    path = engine.save_checkpoint(tmp_path, {"at": 1}, asynchronous=True)
    training_bodies.one_step(engine, 1)
    assert not path.exists()
    may_write.set()
    second = engine.save_checkpoint(tmp_path, {"at": 2}, asynchronous=True)
    assert path.exists(), "one at a time"
    engine.wait_for_checkpoint()
    assert second.exists()
    assert engine.load_checkpoint(path) == (path, {"at": 1})
    assert all(torch.equal(value, expected[name]) for name, value in training_bodies.whole_parameters(engine).items())


def test_what_went_wrong_in_the_background_is_said_by_the_next_call(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    good = engine.save_checkpoint(tmp_path)
    monkeypatch.setattr(storage, "write", full)
    for call in (engine.wait_for_checkpoint, lambda: engine.save_checkpoint(tmp_path)):
        engine.save_checkpoint(tmp_path, asynchronous=True)
        with pytest.raises(BrokenFile, match=r"step-00000001-2: cannot be written \(No space left on device\)"):
            call()
    monkeypatch.undo()
    engine.wait_for_checkpoint()
    assert engine.load_checkpoint(tmp_path)[0] == good


def test_the_newest_are_kept(engine: Any, tmp_path: Path) -> None:
    for step in range(1, 5):
        engine.save_checkpoint(tmp_path, keep_last=2)
        training_bodies.one_step(engine, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]
    engine.load_checkpoint(tmp_path / "step-00000003")
    training_bodies.one_step(engine, 7)
    engine.save_checkpoint(tmp_path, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004-2"]


def test_a_manager_saves_every_so_many_steps(engine: Any, tmp_path: Path) -> None:
    with dsplan.CheckpointManager(engine, tmp_path, every_steps=3, keep_last=2, asynchronous=True) as manager:
        assert manager.load() == (None, {})
        assert manager.latest is None
        for step in range(1, 12):
            training_bodies.one_step(engine, step)
            saved = manager.step({"step": step})
            assert (saved is None) == (engine.global_steps % 3 != 0)
            assert manager.step() is None, "not twice"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000009", "step-00000012"]
    assert manager.load() == (manager.latest, {"step": 11})
    with pytest.raises(CannotRun, match="keep_last=0 keeps no checkpoint"):
        dsplan.CheckpointManager(engine, tmp_path, keep_last=0)


def test_the_config_saves_by_itself(tmp_path: Path) -> None:
    section = {"directory": str(tmp_path), "every_steps": 2, "keep_last": 1, "asynchronous": True}
    engine = engine_of(training_bodies.TinyModel(), config={"checkpoint": section})
    for step in range(5):
        training_bodies.one_step(engine, step)
    engine.wait_for_checkpoint()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]
    with pytest.raises(CannotRun, match=r"checkpoint\.every_steps is set and checkpoint\.directory is not"):
        engine_of(training_bodies.TinyModel(), config={"checkpoint": {"every_steps": 2}})


def test_a_function_of_the_scripts_saves_instead(engine: Any, tmp_path: Path) -> None:
    def save(engine: Any, folder: Path) -> None:
        (folder / "mine.txt").write_text(f"step {engine.global_steps}")

    manager = dsplan.CheckpointManager(engine, tmp_path, save=save)
    path = manager.save({"epoch": 3})
    assert manager.latest == path
    assert (path / "mine.txt").read_text() == "step 1"
    with pytest.raises(BrokenFile, match="was written by a save function of the script's"):
        manager.load()
    (path / "mine.txt").write_text("step 2")
    with pytest.raises(BrokenFile, match=r"mine\.txt: is damaged"):
        manager.load()


class Awkward(nn.Module):
    """Tied, scalar, empty and complex parameters, buffers of several kinds, and state that is no tensor."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.tensor([1 + 2j]))
        self.calls = {"count": 0, "names": ["a"]}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["count"] += 1
        return (self.norm(self.two(self.one(x))) * self.scale).pow(2).mean() + self.nothing.sum()


def awkward_step(engine: Any, seed: int) -> float:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return float(loss.item())


class Counting(torch.optim.Optimizer):
    """Keeps a Python number, a tensor of its own shape, and an option that is a tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "range": (0.1, 0.2)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state.setdefault(parameter, {})
                    state["count"] = state.get("count", 0) + 1
                    state["table"] = state.get("table", torch.zeros(2, 5)) + parameter.grad.sum()
                    with torch.no_grad():
                        parameter -= group["lr"] * parameter.grad / state["count"] + state["table"].mean() / 100
        self.param_groups[0]["lr"].mul_(0.9)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    """It divides by the number of elements."""
    return torch.optim.Adafactor([parameter for parameter in parameters if parameter.numel()])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, adafactor, Counting])
def test_awkward_models_and_optimizers(tmp_path: Path, optimizer: Any) -> None:
    engine = engine_of(Awkward(), optimizer=optimizer)
    for seed in range(3):
        awkward_step(engine, seed)
    engine.save_checkpoint(tmp_path)
    expected = [awkward_step(engine, seed) for seed in (3, 4)]
    fresh = engine_of(Awkward(), optimizer=optimizer)
    fresh.load_checkpoint(tmp_path)
    assert fresh.module.calls == {"count": 3, "names": ["a"]}
    assert fresh.module.norm.num_batches_tracked == 3
    assert [awkward_step(fresh, seed) for seed in (3, 4)] == expected
    kinds = [{key: type(value) for key, value in state.items()} for state in engine.optimizer.state.values()]
    assert [{k: type(v) for k, v in state.items()} for state in fresh.optimizer.state.values()] == kinds
    if optimizer is Counting:
        assert fresh.optimizer.param_groups[0]["range"] == (0.1, 0.2)


def test_tied_weights_load_into_a_model_that_does_not_tie_them(tmp_path: Path) -> None:
    engine = engine_of(Awkward())
    awkward_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    fresh = engine_of(Awkward(tied=False))
    fresh.load_checkpoint(tmp_path)
    assert torch.equal(fresh.module.two.weight, engine.module.one.weight)
    moments = [
        owner.optimizer.state[w]["exp_avg"]
        for owner, w in ((engine, engine.module.one.weight), (fresh, fresh.module.two.weight))
    ]
    assert torch.equal(*moments)


def test_what_cannot_be_saved_is_one_line_and_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="client_state and the scheduler's state must be JSON"):
        engine.save_checkpoint(tmp_path, {"what": object()})
    engine.optimizer.state[engine.module.positions]["history"] = ["a"]
    with pytest.raises(CannotRun, match=r"the optimizer keeps a list \(history\) for positions"):
        engine.save_checkpoint(tmp_path)
    del engine.optimizer.state[engine.module.positions]["history"]
    engine.module.register_buffer("wave", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(CannotRun, match=r"model/wave is torch\.complex128, which safetensors cannot hold"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_with_pickles_is_refused(engine: Any, tmp_path: Path) -> None:
    old = tmp_path / "step-00000001"
    old.mkdir()
    for name in (".metadata", "state.json"):
        (old / name).write_text("{}")
    (tmp_path / "latest").write_text(old.name)
    with pytest.raises(BrokenFile, match="was written by dsplan before its checkpoints had no pickle"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("recipe", [NATIVE, Recipe(strategy="fsdp", world_size=2)], ids=["zero3", "fsdp"])
def test_an_export_is_what_from_pretrained_reads(recipe: Recipe, ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks.run(checkpoint_bodies.export_gpt2, recipe, str(tmp_path))[0]
    for folder in ("whole", "sharded", "from a checkpoint"):
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report.values()), report
        wide = folder == "whole"
        assert model.dtype == (torch.float32 if wide else torch.bfloat16)
        for name, value in model.named_parameters():
            assert torch.equal(value, weights[name] if wide else weights[name].bfloat16()), name
    files = sorted(path.name for path in (tmp_path / "sharded").iterdir())
    assert files[:2] == ["config.json", "generation_config.json"]
    assert len(files) > 4
    assert not list(tmp_path.glob("*/.*")), "nothing is left between"


def test_exports_that_cannot_be(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="holds no checkpoint"):
        dsplan.export_checkpoint(tmp_path, tmp_path / "to")
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CannotRun, match="dtype 'int8' is not known"):
        dsplan.export_checkpoint(tmp_path, tmp_path / "to", dtype="int8")
    assert [path.name for path in dsplan.export_checkpoint(tmp_path, tmp_path / "to")] == ["model.safetensors"]
