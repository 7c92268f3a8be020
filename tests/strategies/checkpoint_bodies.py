"""What the tests of checkpoints run on ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import training_bodies
from safetensors.torch import load_file
from training_bodies import Recipe

from strategies.checkpoint import storage
from strategies.checkpoint.safefile import DTYPES
from strategies.errors import DsplanError


def fill(engine: Any, value: float) -> None:
    """Put one number into every weight and every optimizer state."""
    with torch.no_grad():
        for tensor in _tensors(engine):
            tensor.fill_(value)


def values_of(engine: Any) -> set[float]:
    """The numbers in weights and states."""
    return {number for tensor in _tensors(engine) for number in tensor.detach().unique().tolist()}


def _tensors(engine: Any) -> list[torch.Tensor]:
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    return [*engine.module.parameters(), *states]


def full_disk_on_rank_1(recipe: Recipe, directory: str, asynchronous: bool) -> tuple[str, str, str]:
    """What is said when rank 1 cannot write, the checkpoint that is the latest then, and the one saved afterwards."""
    engine = training_bodies.make_engine(recipe)
    training_bodies.one_step(engine, 0)
    engine.save_checkpoint(directory)
    training_bodies.one_step(engine, 1)
    original, said = storage.write, ""

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    if engine.environment.rank == 1:
        storage.write = full  # type: ignore[assignment]
    try:
        engine.save_checkpoint(directory, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
    except DsplanError as problem:
        said = str(problem)
    finally:
        storage.write = original
    latest = Path(directory, "latest").read_text().strip()
    torch.distributed.barrier()
    after = engine.save_checkpoint(directory)
    return said, latest, os.path.basename(after)


def save_after(recipe: Recipe, directory: str, steps: int) -> list[float]:
    """Train, save, and the losses of the next two steps."""
    engine = training_bodies.make_engine(recipe)
    for step in range(steps):
        training_bodies.one_step(engine, step)
    engine.save_checkpoint(directory, client_state={"at": steps})
    return [training_bodies.one_step(engine, step) for step in range(steps, steps + 2)]


def resume_each(recipe: Recipe, directories: list[str], steps: int) -> list[list[float]]:
    """For each checkpoint, the losses of two steps trained from it; all in one engine."""
    engine = training_bodies.make_engine(recipe)
    found = []
    for directory in directories:
        path, state = engine.load_checkpoint(directory)
        assert path is not None
        assert state == {"at": steps}
        assert engine.global_steps == steps
        found.append([training_bodies.one_step(engine, step) for step in range(steps, steps + 2)])
    return found


def pass_on(recipe: Recipe, source: str, goal: str) -> None:
    """Load one checkpoint and save another, with nothing between."""
    engine = training_bodies.make_engine(recipe)
    engine.load_checkpoint(source)
    engine.save_checkpoint(goal)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the latest checkpoint but random states, whole, put together by hand."""
    folder = directory / (directory / "latest").read_text().strip()
    found = {}
    for name, one in json.loads((folder / "tensors.json").read_text()).items():
        if not name.startswith("rng/"):
            whole = torch.empty(one["shape"], dtype=DTYPES[one["dtype"]])
            for box in one["boxes"]:
                place = tuple(slice(o, o + n) for o, n in zip(box["offsets"], box["sizes"], strict=True))
                whole[place] = load_file(folder / box["file"])[box["key"]]
            found[name] = whole
    return found
