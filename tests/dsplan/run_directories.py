"""Run directories as `dsplan run` leaves them, written by hand for pages of many runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Rows = Iterable[Mapping[str, object]]


def append(path: Path, rows: Rows) -> None:
    """Add rows to a file as ranks and the command do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def steps(first: int, last: int, *, loss: float = 2.0, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Rows of a rank's steps."""
    figures = {"event": "step", "loss": loss, "seconds": seconds, "tokens": 64, "peak_bytes": 3 << 20}
    return [{**figures, "step": step - first, "global_step": step} for step in range(first, last + 1)]


def journal(directory: Path, *rows: Mapping[str, object]) -> None:
    """Add lines to the journal, each of attempt 0 unless it says otherwise."""
    append(directory / "run.jsonl", [{"attempt": 0, **row} for row in rows])


def began(at: float, *, attempt: int = 0, ranks: int = 2) -> dict[str, object]:
    """The journal's line of an attempt that began."""
    return {"event": "attempt", "attempt": attempt, "time": at, "ranks": ranks}


def completed_run(directory: Path, *, at: float, seconds: float, count: int) -> None:
    """A run of two ranks that did `count` steps of a second each."""
    end = {"event": "end", "time": at + seconds, "outcome": "completed", "first_step": 1, "last_step": count}
    journal(directory, began(at), end)
    for rank in range(2):
        append(directory / f"metrics-rank{rank}.jsonl", steps(1, count, loss=2.0 + rank))


def restarted_run(directory: Path, *, now: float) -> None:
    """A run that began 200 s ago, lost a rank after 60 steps in 100 s, and resumed from step 40 ten seconds later."""
    end = {"event": "ending", "time": now - 100, "kind": "killed", "rank": 1, "reason": "SIGKILL", "step": 60}
    journal(
        directory,
        began(now - 200),
        {"event": "saved", "time": now - 130, "step": 40, "path": "checkpoints/40"},
        {**end, "first_step": 1, "last_step": 60},
        {"event": "decision", "time": now - 100, "action": "restart", "why": "", "delay_seconds": 10.0},
        began(now - 90, attempt=1),
        {"event": "alert", "attempt": 1, "time": now - 50, "kind": "loss_spike", "message": "the loss jumped"},
    )
    for rank in range(2):
        append(
            directory / f"metrics-rank{rank}.jsonl",
            [{"event": "attempt", "attempt": 0}, *steps(1, 60), {"event": "attempt", "attempt": 1}, *steps(41, 100)],
        )
        heartbeat(directory, rank, step=100)


def heartbeat(directory: Path, rank: int, *, step: int, quiet_seconds: float = 0.0) -> None:
    """A rank's heartbeat of this moment."""
    beat = {"rank": rank, "pid": 1, "host": "node", "number": 1, "step": step, "calls": step, "section": "forward"}
    text = json.dumps({**beat, "quiet_seconds": quiet_seconds, "time": time.time()})
    (directory / f"rank{rank}.heartbeat").write_text(text)
