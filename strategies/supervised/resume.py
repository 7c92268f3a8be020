"""Going on where an earlier attempt of the run has saved."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hardware_db.errors import DsplanError
from strategies.agree import on_rank_zero
from strategies.checkpoint import folder
from strategies.checkpoint.content import read_content
from strategies.supervised import lineage

if TYPE_CHECKING:
    from strategies.base import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """Where an engine goes on: the checkpoint, and the script's own state in it."""

    made: lineage.Made
    client_state: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return Path(self.made.path)

    @property
    def step(self) -> int:
        return self.made.step


def resume(engine: Engine, run_directory: Path) -> Resumed | None:
    """Restore the newest checkpoint of the run that is whole; None where the run has none. Every rank calls this.

    Raises:
        DsplanError: there are checkpoints and none of them can be loaded; the newest one's reason.
    """
    refusal: DsplanError | None = None
    for made in _candidates(engine, run_directory):
        try:
            path, state = engine._checkpoints.load(Path(made.path))
        except DsplanError as problem:  # on every rank, a BrokenFile on the one that found it
            refusal = refusal or problem
            if engine.is_main:
                print(f"dsplan: {problem}; trying the one before", file=sys.stderr, flush=True)
            continue
        if path is not None:
            if made.is_automatic:
                engine.client_state.update(state)
            return Resumed(made=made, client_state=state)
    if refusal is not None:
        raise refusal
    return None


def step_of(directory: Path) -> int | None:
    """The step of the checkpoint that `load_checkpoint(directory)` would load, the same on every rank; None where
    there is none."""

    def look() -> int | None:
        try:
            path = folder.named_latest(directory)
            return None if path is None else int(read_content(path).progress["global_steps"])
        except (DsplanError, KeyError, ValueError, TypeError, OverflowError):
            return None  # loading it says what is wrong

    return on_rank_zero(look)


def _candidates(engine: Engine, run_directory: Path) -> Sequence[lineage.Made]:
    """The complete checkpoints that any node knows of, newest first; what rank 0 finds."""
    own = [one for one in lineage.read(run_directory) if one.by != "huggingface"]
    everyones: list[Any] = [own]
    if engine.environment.world_size > 1:
        everyones = [None] * engine.environment.world_size
        dist.all_gather_object(everyones, own if engine.environment.local_rank == 0 else [])
    made = [one for of_node in everyones for one in of_node]
    return on_rank_zero(lambda: lineage.newest_first(made))
