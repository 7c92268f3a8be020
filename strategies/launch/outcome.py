"""How a run ended, and the one line that says why. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strategies.launch.causes import Ending
from strategies.launch.endings import STOPPED, exit_status_of

OutcomeName = Literal["completed", "failed", "out_of_memory", "interrupted", "preempted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a run. `reason` is the failing rank's last word, `log` where the rest of it is."""

    name: OutcomeName
    exit_code: int
    rank: int | None = None
    reason: str = ""
    log: Path | None = None


COMPLETED = Outcome(name="completed", exit_code=0)
INTERRUPTED = Outcome(name="interrupted", exit_code=130)


def outcome_of(ending: Ending) -> Outcome:
    """The outcome of a run whose last attempt ended so."""
    if ending.kind == "preempted":
        return Outcome(name="preempted", exit_code=STOPPED)
    return Outcome(
        name="out_of_memory" if ending.kind == "out_of_memory" else "failed",
        exit_code=exit_status_of(ending.kind, ending.type),
        rank=ending.rank,
        reason=ending.reason,
        log=ending.log,
    )
