"""RunReport: what a run did, attempt by attempt, as a value. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from planner.plan import Plan
from strategies.launch.causes import Ending
from strategies.launch.outcome import Outcome
from strategies.launch.policy import Decision
from strategies.launch.spec import LaunchSpec
from strategies.metrics import (
    MeasuredRun,
    Row,
    last_attempt,
    of_attempt,
    read_metrics,
    summarise,
    with_attempts,
)

REPORT_FILE = "report.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptReport:
    """One attempt: when it began and for how long, its plan, the steps it did (None: none), and how it ended.

    `began` is in seconds since 1970. `ending` and `decision` are None for an attempt that completed or was interrupted.
    `seconds_lost` is by how much the restart after it put the run back; None where there was none or nobody knows.
    """

    attempt: int
    began: float
    seconds: float
    ranks: int
    plan: Plan | None = None
    first_step: int | None = None
    last_step: int | None = None
    ending: Ending | None = None
    decision: Decision | None = None
    seconds_lost: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run was asked to do, how it ended, and what it measured. `plan` is the last, None where nothing was
    planned; `attempts` are all of the run, also those of earlier commands."""

    spec: LaunchSpec
    outcome: Outcome
    measured: MeasuredRun
    plan: Plan | None
    attempts: tuple[AttemptReport, ...] = ()


def measured_run(spec: LaunchSpec) -> MeasuredRun:
    """The figures of the whole run; `ranks` counts those of its last attempt."""
    metrics = _metrics(spec.directory)
    ranks = len(of_attempt(metrics, last_attempt(metrics)))
    return replace(summarise(metrics), ranks=ranks or spec.processes)


def measured_attempt(directory: Path, attempt: int) -> MeasuredRun:
    """The figures of one attempt alone."""
    return summarise(of_attempt(_metrics(directory), attempt))


def highest_step(directory: Path, since: int = 0) -> int:
    """The highest step that any rank reached in attempts from `since` on, counted from 1; 0 where none did."""
    rows = ((attempt, row) for of_rank in _metrics(directory) for attempt, row in with_attempts(of_rank))
    steps = (row.get("global_step") for attempt, row in rows if attempt >= since and row.get("event") == "step")
    return max((step for step in steps if isinstance(step, int)), default=0)


def last_attempt_in(directory: Path) -> int:
    """The number of the last attempt that any rank wrote metrics in; -1 where none did."""
    metrics = _metrics(directory)
    return last_attempt(metrics) if any(metrics) else -1


def _metrics(directory: Path) -> list[list[Row]]:
    """The rows of every rank that ever wrote any, by rank."""
    numbers = [int(path.stem.removeprefix("metrics-rank")) for path in directory.glob("metrics-rank*.jsonl")]
    return [list(rows) for rows in read_metrics(directory, max(numbers, default=-1) + 1)]
