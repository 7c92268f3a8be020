"""A finished run becomes a row of the database, which its run directory keeps too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement, Record, RecordError, measure_run
from hardware_db.measurement import Outcome as StoredOutcome
from hardware_db.probe import Machine
from hardware_db.store import add_or_keep, open_store
from hardware_db.store.transfer import from_document, to_document
from hardware_db.units import three_digits
from planner.calibration.learn import Calibrated, refresh
from planner.cluster.probed import probed_cluster
from planner.types.job import cluster_section
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.launch.failure_causes import Ending
from strategies.launch.report import OutcomeName, RunReport, measured_attempt
from strategies.run_directory.claim import read_claim
from strategies.run_directory.files import JOURNAL_FILE
from strategies.run_directory.journal import Journal, read_journal
from strategies.run_directory.machine import own_machine
from strategies.run_directory.spec import STOPS, LaunchSpec
from strategies.telemetry.metrics import measured_of

_STORED_AS: Mapping[OutcomeName, StoredOutcome] = {
    "completed": "completed",
    "failed": "failed",
    "out_of_memory": "out_of_memory",
    "interrupted": "interrupted",
    "preempted": "interrupted",
}


UNPLANNED = "unplanned"
"""Stands in the place of the strategy of a run without a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The place where a run was stored, as one sentence; the id is None if it was not, and the sentence says why."""

    measurement_id: str | None
    sentence: str


def record_run(report: RunReport) -> Stored:
    """Store a run's last attempt with its outcome; where the database cannot be written, the sentence says why."""
    if report.plan is None and not report.measured.steps:
        return Stored(measurement_id=None, sentence="not stored in the database: no training step was seen")
    last = report.attempts[-1]
    if last.decision is not None and last.decision.continues:
        return Stored(measurement_id=None, sentence="stored when the last attempt ended")
    machine = own_machine(report.spec.environment)
    outcome = _STORED_AS[report.outcome.name]
    try:
        document = unplanned(report, machine) if report.plan is None else plan_to_dict(report.plan)
        measurement, where = _stored(document, machine, outcome, report.spec.directory, last.attempt)
    except DsplanError as error:
        return Stored(measurement_id=None, sentence=f"not stored in the database: {error}")
    return Stored(
        measurement_id=measurement.id,
        sentence=f"stored as {measurement.id[:8]} ({measurement.outcome}) in {where}{learnt(machine)}",
    )


def record_attempt(plan: Plan, ending: Ending, spec: LaunchSpec, attempt: int) -> None:
    """Store an attempt that others follow, so that they are planned with what it showed.

    A database that cannot be written is reported when the run ends.
    """
    with suppress(DsplanError):
        machine = own_machine(spec.environment)
        _stored(plan_to_dict(plan), machine, _ended_as(ending), spec.directory, attempt)


def recorded_runs(directory: Path) -> tuple[Record, ...]:
    """Return the rows that the attempts of a run directory became, for a database that has lost them.

    Raises:
        BrokenFile: the directory has no such row, or one that is no record.
    """
    journal = directory / JOURNAL_FILE
    rows = [row for row in read_journal(directory) if row.get("event") == "measured"]
    if not rows:
        raise BrokenFile(
            directory, "holds no measured run", "name a run directory of `dsplan run`, or a file of `dsplan db export`"
        )
    try:
        return tuple(from_document(row.get("measurement")) for row in rows)
    except RecordError as error:
        raise BrokenFile(journal, str(error), "correct or remove the line; nothing was imported") from error


def unplanned(report: RunReport, machine: Machine) -> dict[str, object]:
    """Return what stands for the plan of a run that had none: what was seen of the script, and where it ran.

    Its strategy is none of the planner's, so nothing is ever predicted from it.
    """
    seen = read_claim(report.spec.directory)
    ranks = report.measured.ranks
    return {
        "model": {"name": Path(report.spec.script).name, "parameters": seen.parameters if seen else None},
        "cluster": cluster_section(probed_cluster(machine, ranks=ranks)),
        "workload": {},
        "plan": {"strategy": UNPLANNED, "world_size": ranks, "trained_with": seen.kind if seen else None},
        "memory": {},
        "time": {},
    }


def _stored(
    plan: Mapping[str, object], machine: Machine, outcome: StoredOutcome, directory: Path, attempt: int
) -> tuple[Measurement, str]:
    run = measured_attempt(directory, attempt)
    measurement = measure_run(plan, fingerprint(machine), outcome=outcome, measured=measured_of(run))
    # First here: a database that cannot be written, or is lost, gets the row with `dsplan db import`.
    rates = {"samples_per_second": run.samples_per_second}  # of which the database has no column
    Journal(directory).append("measured", attempt, measurement=to_document(measurement), **rates)
    return measurement, add_or_keep(measurement)


def _ended_as(ending: Ending) -> StoredOutcome:
    if ending.kind == "out_of_memory":
        return "out_of_memory"
    return "interrupted" if ending.kind in STOPS else "failed"


def learnt(machine: Machine) -> str:
    """Learn from the runs so far, and return what to say where that taught something new."""
    try:
        with open_store() as store:
            lessons = refresh(store, machine)
    except DsplanError as error:
        return f"; nothing was learnt from it: {error}"
    return "".join(map(describe_improvement, lessons.kinds))


_LARGE = 2.0
"""The factor from which on an error is said as one, a choice: the percentage of a prediction too small ends at 100."""


def describe_improvement(kind: Calibrated) -> str:
    """Return what was learnt of one kind of hardware, empty where no rounded figure of it has changed."""
    lesson = kind.lesson
    if not kind.is_new or lesson.calibration is None or lesson.error_after is None or lesson.error_before is None:
        return ""
    measured = [row.seconds for row in kind.rows]
    before = _describe_accuracy(lesson.error_before, lesson.shipped, measured)
    after = _describe_accuracy(lesson.error_after, lesson.left_out, measured)
    if before == after or (kind.last_error is not None and f"{kind.last_error:.0%}" == f"{lesson.error_after:.0%}"):
        return ""
    runs = f"median over {lesson.rows} runs, each left out in turn"
    return f"; predicted step times are now {after} instead of {before} ({runs})"


def _describe_accuracy(error: float, predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Return how near predictions are in the median, in percent or, where they are far off, by which factor."""
    logs = [abs(math.log(seconds / real)) for seconds, real in zip(predicted, measured, strict=True)]
    factor = math.exp(statistics.median(logs))
    return f"off by {three_digits(float(f'{factor:.2g}'))}x" if factor >= _LARGE else f"within {error:.0%}"
