"""The attempts of a run as its journal tells them, for the last page of the command that goes on with it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from planner.plan_io import plan_from_dict
from strategies.launch.causes import Ending
from strategies.launch.journal import read_journal
from strategies.launch.policy import Decision
from strategies.launch.report import AttemptReport
from strategies.metrics import Row, of_attempt, read_metrics

_COMMAND_ENDED = Ending(kind="killed", reason="dsplan run itself was ended")


def earlier_attempts(directory: Path) -> tuple[AttemptReport, ...]:
    """The attempts in a run directory, the first one first. One of which the journal has no end was cut off together
    with the command that made it; the metrics tell how far it came."""
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_journal(directory):
        by_attempt.setdefault(int(row.get("attempt", 0)), []).append(row)
    metrics = read_metrics(directory, 1)
    reports = [_attempt(number, rows, _of(metrics, number)) for number, rows in sorted(by_attempt.items())]
    lost = {row["attempt"]: row.get("seconds_lost") for rows in by_attempt.values() for row in rows if _is(row, "back")}
    return tuple(replace(one, seconds_lost=lost.get(one.attempt + 1)) for one in reports if one is not None)


def _of(metrics: Sequence[Sequence[Row]], number: int) -> Sequence[Row]:
    """Rank 0's rows of one attempt."""
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
        decision=Decision(**_known(Decision, decision)) if decision else None,
    )


def _last_signs(rows: Sequence[Mapping[str, Any]], metrics: Sequence[Row]) -> dict[str, Any]:
    """The end of an attempt that nobody wrote down: its steps, and when it was last heard of."""
    steps = [row["global_step"] for row in metrics if _is(row, "step") and "global_step" in row]
    heard = [row["time"] for row in (*rows, *metrics) if isinstance(row.get("time"), (int, float))]
    last = steps[-1] if steps else None
    ending = replace(_COMMAND_ENDED, step=last)
    return {"time": max(heard), "first_step": steps[0] if steps else None, "last_step": last, "ending": ending}


def _ending(row: Mapping[str, Any]) -> Ending:
    found = _known(Ending, row)
    return Ending(**{**found, "log": Path(found["log"]) if found.get("log") else None})


def _known(kind: type[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: row[item.name] for item in fields(kind) if item.name in row}


def _is(row: Mapping[str, Any], event: str) -> bool:
    return row.get("event") == event
