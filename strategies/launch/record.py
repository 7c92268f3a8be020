"""A finished run becomes a row of the database."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hardware_db.errors import DsplanError
from hardware_db.files import database_path
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement, measure_run
from hardware_db.measurement import Outcome as StoredOutcome
from hardware_db.probe import Machine, probe
from hardware_db.store import open_store
from planner.calibration.refresh import refresh
from planner.cluster.probed import probed_cluster
from planner.types.job import cluster_section
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.launch.diagnosis import Ending
from strategies.launch.report import OutcomeName, RunReport, measured_attempt
from strategies.run_directory.claim import read_claim
from strategies.run_directory.spec import STOPS
from strategies.telemetry.metrics import MeasuredRun, measured_of

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
    """Where a run was stored, as one sentence; the id is None where it was not, and the sentence says why."""

    measurement_id: str | None
    sentence: str


def record_run(report: RunReport) -> Stored:
    """Store a run's last attempt with its outcome. A database that cannot be written undoes no training: the reason is
    told."""
    if report.plan is None and not report.measured.steps:
        return Stored(measurement_id=None, sentence="not stored in the database: no training step was seen")
    last = report.attempts[-1]
    if last.decision is not None and last.decision.continues:
        return Stored(measurement_id=None, sentence="stored when the last attempt ended")
    machine = probe()
    attempt = last.attempt
    try:
        measured = measured_attempt(report.spec.directory, attempt)
        document = unplanned(report, machine) if report.plan is None else plan_to_dict(report.plan)
        measurement = _stored(document, machine, _STORED_AS[report.outcome.name], measured)
    except DsplanError as error:
        return Stored(measurement_id=None, sentence=f"not stored in the database: {error}")
    return Stored(
        measurement_id=measurement.id,
        sentence=f"stored as {measurement.id[:8]} ({measurement.outcome}) in {database_path()}{learnt(machine)}",
    )


def record_attempt(plan: Plan, ending: Ending, directory: Path, attempt: int) -> None:
    """Store an attempt that others follow, so that they are planned with what it showed.

    A database that cannot be written is reported when the run ends.
    """
    with suppress(DsplanError):
        _stored(plan_to_dict(plan), probe(), _ended_as(ending), measured_attempt(directory, attempt))


def unplanned(report: RunReport, machine: Machine) -> dict[str, object]:
    """What stands in the place of a plan for a run that had none: what was seen of the script, and where it ran.

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


def _stored(plan: Mapping[str, object], machine: Machine, outcome: StoredOutcome, measured: MeasuredRun) -> Measurement:
    measurement = measure_run(plan, fingerprint(machine), outcome=outcome, measured=measured_of(measured))
    with open_store() as store:
        store.add(measurement)
    return measurement


def _ended_as(ending: Ending) -> StoredOutcome:
    if ending.kind == "out_of_memory":
        return "out_of_memory"
    return "interrupted" if ending.kind in STOPS else "failed"


def learnt(machine: Machine) -> str:
    """Learns from the runs so far; what to say where that taught something new."""
    try:
        with open_store() as store:
            lessons = refresh(store, machine)
    except DsplanError as error:
        return f"; nothing was learnt from it: {error}"
    found = [one.lesson for one in lessons.kinds if one.is_new and one.lesson.calibration is not None]
    return "".join(
        f"; step times are now predicted within {lesson.error_after:.0%} instead of {lesson.error_before:.0%}"
        f" (median over {lesson.rows} runs, each left out in turn)"
        for lesson in found
    )
