"""Which checkpoints a run has made, wherever they are: one line each in `checkpoints.jsonl` of the run directory.

A line is written when saving begins. A checkpoint has its path only when it is complete, so the lines whose path is
there are the complete ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

LINEAGE_FILE = "checkpoints.jsonl"
Author = Literal["engine", "huggingface"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One checkpoint of a run: the optimizer step it is of, who wrote it, whether nobody asked for it but the orders,
    and when it was begun (seconds since 1970)."""

    path: str
    step: int
    attempt: int = 0
    by: Author = "engine"
    is_automatic: bool = False
    time: float = field(default_factory=time.time)


def note(directory: Path, made: Made) -> None:
    """Add a checkpoint to the list of a run.

    Raises:
        OSError: the run directory cannot be written.
    """
    line = json.dumps(asdict(made)) + "\n"
    descriptor = os.open(directory / LINEAGE_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(directory: Path) -> list[Made]:
    """The checkpoints of a run in the order they were begun; lines that a crash cut short are left out."""
    path = directory / LINEAGE_FILE
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    made = []
    for line in lines:
        try:
            made.append(Made(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return made


def outdated(made: Iterable[Made], keep: int) -> list[Path]:
    """The automatic checkpoints that are complete and no longer wanted, where the newest `keep` stay."""
    return [Path(one.path) for one in newest_first(one for one in made if one.is_automatic)[keep:]]


def newest_first(made: Iterable[Made]) -> list[Made]:
    """The complete ones, the furthest step first and of one step the last."""
    by_path = {one.path: one for one in made}
    complete = [one for one in by_path.values() if Path(one.path).is_dir()]
    return sorted(complete, key=lambda one: (one.step, one.time), reverse=True)
