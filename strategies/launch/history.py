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

_COMMAND_ENDED = Ending(kind="killed", reason="dsplan run itself was ended")


def earlier_attempts(directory: Path) -> tuple[AttemptReport, ...]:
    """The attempts in a run directory, the first one first. One of which the journal has no end was cut off together
    with the command that made it."""
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for row in read_journal(directory):
        by_attempt.setdefault(int(row.get("attempt", 0)), []).append(row)
    reports = [_attempt(number, rows) for number, rows in sorted(by_attempt.items())]
    lost = {row["attempt"]: row.get("seconds_lost") for rows in by_attempt.values() for row in rows if _is(row, "back")}
    return tuple(replace(one, seconds_lost=lost.get(one.attempt + 1)) for one in reports if one is not None)


def _attempt(number: int, rows: Sequence[Mapping[str, Any]]) -> AttemptReport | None:
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
    return AttemptReport(
        attempt=number,
        began=float(began["time"]),
        seconds=float((closed or rows[-1])["time"] - began["time"]),
        ranks=int(began.get("ranks") or 0) if plan is None else plan.configuration.world_size,
        plan=plan,
        first_step=closed.get("first_step"),
        last_step=closed.get("last_step"),
        ending=_ending(ending) if ending else (None if closed else _COMMAND_ENDED),
        decision=Decision(**_known(Decision, decision)) if decision else None,
    )


def _ending(row: Mapping[str, Any]) -> Ending:
    found = _known(Ending, row)
    return Ending(**{**found, "log": Path(found["log"]) if found.get("log") else None})


def _known(kind: type[Any], row: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: row[item.name] for item in fields(kind) if item.name in row}


def _is(row: Mapping[str, Any], event: str) -> bool:
    return row.get("event") == event
