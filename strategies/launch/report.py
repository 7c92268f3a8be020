"""The report of a run, attempt by attempt, as a value. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.errors import DsplanError
from planner.types.plan import Plan
from planner.types.plan_io import plan_from_dict
from strategies.launch.failure_causes import Ending
from strategies.launch.policy import Decision
from strategies.run_directory.files import metrics_files
from strategies.run_directory.journal import read_journal
from strategies.run_directory.spec import STOPPED, LaunchSpec, exit_status_of
from strategies.telemetry.metrics import (
    MeasuredRun,
    Pace,
    Row,
    last_attempt,
    of_attempt,
    read_metrics,
    summarise,
    with_attempts,
)

# The outcome of a run in one line.


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
    """Return the outcome of a run whose last attempt ended so."""
    if ending.kind == "preempted":
        return Outcome(name="preempted", exit_code=STOPPED)
    return Outcome(
        name="out_of_memory" if ending.kind == "out_of_memory" else "failed",
        exit_code=exit_status_of(ending.kind, ending.type),
        rank=ending.rank,
        reason=ending.reason,
        log=ending.log,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptReport:
    """One attempt: when it began and for how long, its plan, the steps it did (None: none), and how it ended.

    `began` is in seconds since 1970. `ending` and `decision` are None for an attempt that completed or was interrupted.
    `seconds_lost` is by how much the restart after it put the run back, or None if there was none or nobody knows.
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
    """The request, the end and the measurements of a run."""

    spec: LaunchSpec
    outcome: Outcome
    measured: MeasuredRun
    plan: Plan | None
    """The last; None if nothing was planned."""
    attempts: tuple[AttemptReport, ...] = ()
    """All of the run, also those of earlier commands."""

    @property
    def counted(self) -> Literal["tokens", "samples"]:
        """The unit of rates: tokens, or samples where the plan counts these or nothing else was measured."""
        return counted_unit(self.plan, self.measured)

    @property
    def units_per_second(self) -> float | None:
        """Measured of all ranks."""
        return rate_in(self.counted, self.measured)

    @property
    def predicted_units_per_second(self) -> float | None:
        """Predicted of all ranks."""
        if self.plan is None:
            return None
        rates = self.plan.throughput
        if self.counted == "samples":
            return rates.samples_per_second
        return rates.tokens_per_second_per_gpu * self.plan.configuration.world_size


def counted_unit(plan: Plan | None, measured: MeasuredRun | Pace) -> Literal["tokens", "samples"]:
    """Return what rates count: samples where the plan does, or where no tokens were measured."""
    counts_samples = plan is not None and plan.configuration.counts_samples
    is_alone = measured.tokens_per_second is None and measured.samples_per_second is not None
    return "samples" if counts_samples or is_alone else "tokens"


def rate_in(unit: Literal["tokens", "samples"], measured: MeasuredRun | Pace) -> float | None:
    """Return the measured rate of all ranks in a unit."""
    return measured.samples_per_second if unit == "samples" else measured.tokens_per_second


def measured_run(spec: LaunchSpec, metrics: Sequence[Sequence[Row]] | None = None) -> MeasuredRun:
    """Return the figures of the run, of `metrics` where somebody has read them; `ranks` are its last attempt's."""
    metrics = metrics_of(spec.directory) if metrics is None else metrics
    ranks = len(of_attempt(metrics, last_attempt(metrics)))
    return replace(summarise(metrics), ranks=ranks or spec.processes)


def measured_attempt(directory: Path, attempt: int) -> MeasuredRun:
    """Return the figures of one attempt alone."""
    return summarise(of_attempt(metrics_of(directory), attempt))


def highest_step(directory: Path, since: int = 0) -> int:
    """Return the highest step of any rank in attempts from `since` on, counted from 1; 0 where there is none."""
    rows = ((attempt, row) for of_rank in metrics_of(directory) for attempt, row in with_attempts(of_rank))
    steps = (row.get("global_step") for attempt, row in rows if attempt >= since and row.get("event") == "step")
    return max((step for step in steps if isinstance(step, int)), default=0)


def last_attempt_in(directory: Path) -> int:
    """Return the number of the last attempt that any rank wrote metrics in; -1 where none did."""
    metrics = metrics_of(directory)
    return last_attempt(metrics) if any(metrics) else -1


def metrics_of(directory: Path) -> list[list[Row]]:
    """Return the rows of every rank that ever wrote any, by rank."""
    return [list(rows) for rows in read_metrics(directory, max(metrics_files(directory), default=-1) + 1)]


# The attempts of a run as its journal has them, for the last page of the command that resumes it.


_COMMAND_ENDED = Ending(kind="killed", reason="dsplan run itself was ended")


def earlier_attempts(directory: Path, metrics: Sequence[Sequence[Row]] | None = None) -> tuple[AttemptReport, ...]:
    """Return the attempts in a run directory, the first one first.

    One of which the journal has no end was cut off with its command; the metrics, read here where nobody has, show how
    far it came.
    """
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_journal(directory):
        by_attempt.setdefault(int(row.get("attempt", 0)), []).append(row)
    metrics = read_metrics(directory, 1) if metrics is None else metrics[:1]
    reports = [_attempt(number, rows, _of(metrics, number)) for number, rows in sorted(by_attempt.items())]
    lost = {row["attempt"]: row.get("seconds_lost") for rows in by_attempt.values() for row in rows if _is(row, "back")}
    return tuple(replace(report, seconds_lost=lost.get(report.attempt + 1)) for report in reports if report is not None)


def _of(metrics: Sequence[Sequence[Row]], number: int) -> Sequence[Row]:
    """Return rank 0's rows of one attempt."""
    return next(iter(of_attempt(metrics, number)), ())


def _attempt(number: int, rows: Sequence[Mapping[str, Any]], metrics: Sequence[Row]) -> AttemptReport | None:
    began = next((row for row in rows if _is(row, "attempt")), None)
    if began is None:
        return None
    ending = next((row for row in rows if _is(row, "ending")), None)
    decision = next((row for row in rows if _is(row, "decision")), None)
    closed = ending or next((row for row in rows if _is(row, "end")), {})
    plans = [row["plan"] for row in rows if _is(row, "plan")]
    try:
        plan = plan_from_dict(plans[-1]) if plans else None
    except DsplanError:
        plan = None  # of another version; the page can do without
    if not closed:
        closed = _last_signs(rows, metrics)
    return AttemptReport(
        attempt=number,
        began=float(began["time"]),
        seconds=float(closed["time"] - began["time"]),
        ranks=int(began.get("ranks") or 0) if plan is None else plan.configuration.world_size,
        plan=plan,
        first_step=closed.get("first_step"),
        last_step=closed.get("last_step"),
        ending=_ending(ending) if ending else closed.get("ending"),
        decision=Decision(**_fields_in(Decision, decision)) if decision else None,
    )


def _last_signs(rows: Sequence[Mapping[str, Any]], metrics: Sequence[Row]) -> dict[str, Any]:
    """Return the end of an attempt that nobody wrote down: its steps, and when it was last heard of."""
    steps = [row["global_step"] for row in metrics if _is(row, "step") and "global_step" in row]
    heard = [row["time"] for row in (*rows, *metrics) if isinstance(row.get("time"), (int, float))]
    last = steps[-1] if steps else None
    ending = replace(_COMMAND_ENDED, step=last)
    return {"time": max(heard), "first_step": steps[0] if steps else None, "last_step": last, "ending": ending}


def _ending(row: Mapping[str, Any]) -> Ending:
    values = _fields_in(Ending, row)
    return Ending(**{**values, "log": Path(values["log"]) if values.get("log") else None})


def _fields_in(kind: type[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: row[item.name] for item in fields(kind) if item.name in row}


def _is(row: Mapping[str, Any], event: str) -> bool:
    return row.get("event") == event
