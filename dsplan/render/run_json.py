"""The object that `dsplan run --json` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from planner.plan_io import plan_to_dict

if TYPE_CHECKING:
    from strategies.launch.record import Stored
    from strategies.launch.report import AttemptReport, RunReport


def report_to_dict(report: RunReport, stored: Stored) -> dict[str, object]:
    """Outcome, measurements, attempts, plan (null where nothing was planned) and where the run was stored."""
    outcome = report.outcome
    measured = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(report.measured).items()
    }
    return {
        "schema_version": 1,
        "script": report.spec.script,
        "processes": report.spec.processes,
        "run_directory": report.spec.run_directory,
        "outcome": outcome.name,
        "exit_code": outcome.exit_code,
        "failed_rank": outcome.rank,
        "reason": outcome.reason,
        "log": None if outcome.log is None else str(outcome.log),
        "measured": measured,
        "attempts": [_attempt(one) for one in report.attempts],
        "plan": None if report.plan is None else plan_to_dict(report.plan),
        "measurement_id": stored.measurement_id,
    }


def _attempt(one: AttemptReport) -> dict[str, object]:
    """`began` is in seconds since 1970; the plan is its `plan` section."""
    return {
        "attempt": one.attempt,
        "began": one.began,
        "seconds": one.seconds,
        "ranks": one.ranks,
        "first_step": one.first_step,
        "last_step": one.last_step,
        "plan": None if one.plan is None else plan_to_dict(one.plan)["plan"],
        "ending": None if one.ending is None else one.ending.to_dict(),
        "decision": None if one.decision is None else asdict(one.decision),
        "seconds_lost": one.seconds_lost,
    }
