"""Which checkpoints a run has made, wherever they are: one line each in `checkpoints.jsonl` of the run directory.

A line is written when saving begins. A checkpoint has its path only when it is complete, so the lines whose path is
there are the complete ones. The journal lists every complete one a second time (`saved`), and an engine's checkpoint
says itself which run and attempt it is of: what is lost of the list is found again. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from strategies.run_directory.files import LINEAGE_FILE
from strategies.run_directory.journal import append_line, read_journal

Author = Literal["engine", "huggingface"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One checkpoint of a run: the optimizer step it is of, who wrote it, whether nobody asked for it but the options,
    when it was begun (seconds since 1970), and the id of the run, empty where nobody knows it."""

    path: str
    step: int
    attempt: int = 0
    by: Author = "engine"
    is_automatic: bool = False
    time: float = field(default_factory=time.time)
    run: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the files of a run directory say of its checkpoints.

    `listed` are those of the list in the order they were begun, `journalled` those that the journal knows to have been
    complete; `damaged_lines` of the list cannot be read.
    """

    listed: tuple[Made, ...] = ()
    journalled: tuple[Made, ...] = ()
    damaged_lines: int = 0
    has_list: bool = False

    @property
    def all(self) -> list[Made]:
        """Each checkpoint once; the list's word counts."""
        return list({checkpoint.path: checkpoint for checkpoint in (*self.journalled, *self.listed)}.values())


def note(directory: Path, made: Made) -> None:
    """Add a checkpoint to the list of a run.

    Raises:
        OSError: the run directory cannot be written.
    """
    append_line(directory / LINEAGE_FILE, (json.dumps(asdict(made)) + "\n").encode())


def read(directory: Path) -> list[Made]:
    """The checkpoints of a run in the order they were begun; lines that a crash cut short are left out."""
    return list(known(directory).listed)


def known(directory: Path) -> Known:
    """What list and journal say."""
    path = directory / LINEAGE_FILE
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    rows = [_row(line) for line in lines if line.strip()]
    listed = [made for row in rows if (made := _made(row)) is not None]
    saved = [made for row in read_journal(directory) if row.get("event") == "saved" and (made := _made(row))]
    return Known(
        listed=tuple(listed),
        journalled=tuple(saved),
        damaged_lines=len(rows) - len(listed),
        has_list=path.is_file(),
    )


def outdated(made: Sequence[Made], keep: int, *, run: str = "", since: int = 0, has_nodes: bool = False) -> list[Path]:
    """The automatic checkpoints that are complete and no longer wanted, where the newest `keep` stay.

    Those of another run, or of attempts before `since`, are neither counted nor named; where a run `has_nodes` that
    come and go, all that it lists are its own (`own_runs`).
    """
    runs = own_runs(made, run, has_nodes=has_nodes)
    own = [
        checkpoint
        for checkpoint in made
        if checkpoint.is_automatic and checkpoint.run in runs and checkpoint.attempt >= since
    ]
    return [Path(checkpoint.path) for checkpoint in newest_first(own)[keep:]]


def own_runs(made: Iterable[Made], run: str, *, has_nodes: bool) -> set[str]:
    """The ids under which a run has written checkpoints: each of its nodes has one, and that of the node with rank 0
    is the mark. Also where no other node is left, the list has the ids of all whose rank 0 wrote."""
    return {run, *(checkpoint.run for checkpoint in made if has_nodes)}


def newest_first(made: Iterable[Made]) -> list[Made]:
    """The complete ones, the furthest step first and of one step the last."""
    by_path = {checkpoint.path: checkpoint for checkpoint in made}
    complete = [checkpoint for checkpoint in by_path.values() if Path(checkpoint.path).is_dir()]
    return sorted(complete, key=lambda checkpoint: (checkpoint.step, checkpoint.time), reverse=True)


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _made(row: Any) -> Made | None:
    """Return a row of the list or of the journal, or None if it is neither."""
    if not isinstance(row, Mapping) or not isinstance(row.get("path"), str):
        return None
    step, attempt = row.get("step"), row.get("attempt", 0)
    if not isinstance(step, int) or not isinstance(attempt, int):
        return None
    found = {item.name: row[item.name] for item in fields(Made) if item.name in row}
    return Made(**{**found, "time": _seconds(row.get("time"))})


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
