"""Checkpoints that a run has made, wherever they are: one line each in `checkpoints.jsonl` of the run directory.

A line is written when saving begins. A checkpoint has its path only when it is complete, so the lines whose path is
there are the complete ones; of those in an object store a second line says so to the launcher, which asks no store.
The journal lists every complete one a second time (`saved`), and an engine's checkpoint says itself which run and
attempt it is of: what is lost of the list is found again. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from strategies.checkpoint.object_store import location
from strategies.checkpoint.retention import complete_among
from strategies.run_directory.files import LINEAGE_FILE
from strategies.run_directory.journal import append_line, read_journal

Author = Literal["engine", "huggingface"]
_COMPLETE = "complete"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCheckpoint:
    """One checkpoint of a run."""

    path: str
    step: int
    """The optimizer step it is of."""
    attempt: int = 0
    by: Author = "engine"
    is_automatic: bool = False
    """Whether nothing but the options demanded it."""
    time: float = field(default_factory=time.time)
    """When it was begun, in seconds since 1970."""
    run: str = ""
    """The id of the run; empty where nobody knows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The checkpoints of a run, as the files of its directory have them."""

    listed: tuple[RunCheckpoint, ...] = ()
    """Those of the list in the order they were begun."""
    journalled: tuple[RunCheckpoint, ...] = ()
    """Those that the journal knows to have been complete."""
    damaged_lines: int = 0
    """Lines of the list that cannot be read."""
    has_list: bool = False
    in_stores: frozenset[str] = frozenset()
    """The paths of those in object stores that were complete."""

    @property
    def all(self) -> list[RunCheckpoint]:
        """Each checkpoint once; the list's word counts."""
        return list({checkpoint.path: checkpoint for checkpoint in (*self.journalled, *self.listed)}.values())


def note(directory: Path, checkpoint: RunCheckpoint) -> None:
    """Add a checkpoint to the list of a run.

    Raises:
        OSError: the run directory cannot be written.
    """
    append_line(directory / LINEAGE_FILE, (json.dumps(asdict(checkpoint)) + "\n").encode())


def note_complete(directory: Path, path: str) -> None:
    """Add to the list that a checkpoint in an object store is complete.

    Raises:
        OSError: the run directory cannot be written.
    """
    append_line(directory / LINEAGE_FILE, (json.dumps({_COMPLETE: path}) + "\n").encode())


def read(directory: Path) -> list[RunCheckpoint]:
    """Read the checkpoints of a run in the order they were begun; lines that a crash cut short are left out."""
    return list(read_lineage(directory).listed)


def read_lineage(directory: Path) -> Lineage:
    """Read list and journal; lines of the list that a crash cut short are counted and left out."""
    path = directory / LINEAGE_FILE
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows = [_row(line) for line in lines if line.strip()]
    in_stores = {row[_COMPLETE] for row in rows if isinstance(row, dict) and isinstance(row.get(_COMPLETE), str)}
    rows = [row for row in rows if not isinstance(row, dict) or _COMPLETE not in row]
    listed = [checkpoint for row in rows if (checkpoint := _from_row(row)) is not None]
    saved_rows = (row for row in read_journal(directory) if row.get("event") == "saved")
    saved = [checkpoint for row in saved_rows if (checkpoint := _from_row(row))]
    return Lineage(
        listed=tuple(listed),
        journalled=tuple(saved),
        damaged_lines=len(rows) - len(listed),
        has_list=path.is_file(),
        in_stores=frozenset(in_stores),
    )


def outdated(
    checkpoints: Sequence[RunCheckpoint], keep: int, *, run: str = "", since: int = 0, has_nodes: bool = False
) -> list[Path]:
    """List the automatic checkpoints that are complete and no longer wanted, where the newest `keep` stay.

    Those of another run, or of attempts before `since`, are neither counted nor named; where a run `has_nodes` that
    come and go, all that it lists are its own (`own_runs`).
    """
    runs = own_runs(checkpoints, run, has_nodes=has_nodes)
    own = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.is_automatic and checkpoint.run in runs and checkpoint.attempt >= since
    ]
    return [location(checkpoint.path) for checkpoint in newest_first(own)[keep:]]


def own_runs(checkpoints: Iterable[RunCheckpoint], run: str, *, has_nodes: bool) -> set[str]:
    """Collect the ids under which a run has written checkpoints: one of each node whose rank 0 wrote."""
    return {run, *(checkpoint.run for checkpoint in checkpoints if has_nodes)}


def newest_first(checkpoints: Iterable[RunCheckpoint]) -> list[RunCheckpoint]:
    """Sort those that are complete: the furthest step first, and of one step the last."""
    by_path = {checkpoint.path: checkpoint for checkpoint in checkpoints}
    there = complete_among(by_path)
    complete = [checkpoint for checkpoint in by_path.values() if checkpoint.path in there]
    return sorted(complete, key=lambda checkpoint: (checkpoint.step, checkpoint.time), reverse=True)


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _from_row(row: Any) -> RunCheckpoint | None:
    """Return the checkpoint of a row of the list or of the journal, or None if it is neither."""
    if not isinstance(row, Mapping) or not isinstance(row.get("path"), str):
        return None
    step, attempt = row.get("step"), row.get("attempt", 0)
    if not isinstance(step, int) or not isinstance(attempt, int):
        return None
    begun = row.get("time")
    values = {item.name: row[item.name] for item in fields(RunCheckpoint) if item.name in row}
    return RunCheckpoint(**{**values, "time": float(begun) if isinstance(begun, (int, float)) else 0.0})
