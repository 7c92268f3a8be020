"""What the tests of checkpoints run on ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import training_bodies
from training_bodies import Recipe

from strategies.checkpoint import storage
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
