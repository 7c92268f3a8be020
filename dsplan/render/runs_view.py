"""The runs of a team in one table: state, steps, goodput, cost so far and alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Cell, Table, columns
from hardware_db.units import format_count, format_seconds, three_digits
from strategies.launch.run_status import LISTED_STATES, RunStatus

_MOST_REASONS = 5
"""Lines below the table about runs that need somebody."""
_WORDS = 160
"""Letters of a reason that are shown."""


def runs_blocks(runs: Sequence[RunStatus], price: float | None = None, *, most: int | None = None) -> list[Block]:
    """Return the table of the runs, `most` of them, below a line of them all; `price` is of a GPU-hour in dollars."""
    shown = runs if most is None else runs[:most]
    blocks: list[Block] = [Text(text=_total_text(runs, price), style="heading")]
    if shown:
        blocks.append(_table(shown, price))
    if len(shown) < len(runs):
        blocks.append(Text(text=f"and {len(runs) - len(shown)} more", style="faint"))
    troubled = [run for run in shown if run.state in ("stalled", "failed", "silent")][:_MOST_REASONS]
    blocks += [Text(text=f"{run.name}: {_reason(run)}"[:_WORDS], style="warning") for run in troubled]
    return blocks


def _total_text(runs: Sequence[RunStatus], price: float | None) -> str:
    counts = Counter(run.state for run in runs)
    states = [f"{counts[state]} {state}" for state in LISTED_STATES if counts[state]]
    number = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    costs = [*_hours_texts(runs), *([f"${usd:,.2f}"] if (usd := _usd_total(runs, price)) is not None else [])]
    return "; ".join(filter(None, (f"{number}: {', '.join(states)}" if states else "no runs", ", ".join(costs))))


def _hours_texts(runs: Sequence[RunStatus]) -> list[str]:
    by_device = {device: [run.device_hours for run in runs if run.device == device] for device in ("gpu", "cpu")}
    return [_hours_text(sum(hours), device) for device, hours in by_device.items() if hours]


def _hours_text(hours: float, device: str) -> str:
    return f"{three_digits(hours)} {device.upper()}-h"


def _usd_total(runs: Iterable[RunStatus], price: float | None) -> float | None:
    priced = [usd for run in runs if (usd := run.usd(price)) is not None]
    return sum(priced) if priced else None


def _table(runs: Sequence[RunStatus], price: float | None) -> Table:
    units = {run.counted for run in runs if run.units_per_second is not None} or {"tokens"}
    rate = f"????>{min(units)}/s" if len(units) == 1 else "????>per second"
    names = [
        "run", "state", ">step", "???>loss", "???>step time", rate, "?>goodput", "??>cost", "???>saved",
        "alerts",
    ]  # fmt: skip
    rows = [_row(run, price, names_unit=len(units) > 1) for run in runs]
    if any(run.origin is not None for run in runs):
        names.insert(2, "?by")
        for row, run in zip(rows, runs, strict=True):
            row.insert(2, _origin_text(run) or "-")
    return Table(columns=columns(*names), rows=rows)


def _origin_text(run: RunStatus) -> str:
    """Return the account and the machine of whoever reported a run; empty where its files tell of it."""
    return "" if run.origin is None else "@".join(filter(None, (run.origin.user, run.origin.host)))


def _row(run: RunStatus, price: float | None, *, names_unit: bool) -> list[Cell]:
    usd = run.usd(price)
    unit = f" {run.counted}" if names_unit else ""
    reached = f"{run.step:,}" + (f"/{run.steps:,}" if run.steps else "")
    return [
        run.name,
        _state_text(run),
        reached,
        "-" if run.loss is None else f"{run.loss:.4f}",
        "-" if run.step_seconds is None else format_seconds(run.step_seconds),
        "-" if run.units_per_second is None else format_count(run.units_per_second) + unit,
        "-" if run.goodput is None else f"{run.goodput:.0%}",
        _hours_text(run.device_hours, run.device) + ("" if usd is None else f", ${usd:,.2f}"),
        _saved_text(run),
        _alerts_text(run),
    ]


def _state_text(run: RunStatus) -> str:
    """Return the state, with what kind of end it was where that says more."""
    return run.state if run.outcome in ("", "completed", run.state) else f"{run.state}: {run.outcome}"


def _saved_text(run: RunStatus) -> str:
    """Return the step of the last checkpoint, and while the run goes on its age."""
    if run.checkpoint_step is None or run.checkpoint_age_seconds is None:
        return "-"
    return f"{run.checkpoint_step:,}" + (f", {format_seconds(run.checkpoint_age_seconds)} ago" if run.is_alive else "")


def _alerts_text(run: RunStatus) -> str:
    parts = [f"{run.restarts} {'restart' if run.restarts == 1 else 'restarts'}"] if run.restarts else []
    parts += [kind.replace("_", " ") + (f" x{count}" if count > 1 else "") for kind, count in run.alerts.items()]
    return ", ".join(parts) or "-"


def _reason(run: RunStatus) -> str:
    if run.state == "stalled" and run.quiet_seconds is not None:
        return f"no progress for {format_seconds(run.quiet_seconds)}"
    if run.state == "silent" and run.heard_seconds_ago is not None:
        return f"not heard of for {format_seconds(run.heard_seconds_ago)}, by {_origin_text(run)}"
    return run.last_words or (f"{run.outcome}, see its log on {run.origin.host}" if run.origin else run.outcome)


def runs_to_dict(runs: Sequence[RunStatus], price: float | None = None) -> dict[str, Any]:
    """Return what `watch --runs --json` prints."""
    return {
        "schema_version": 1,
        "runs": [_to_dict(run, price) for run in runs],
        "states": {state: sum(run.state == state for run in runs) for state in LISTED_STATES},
        "gpu_hours": sum(run.device_hours for run in runs if run.device == "gpu"),
        "usd": _usd_total(runs, price),
    }


def _to_dict(run: RunStatus, price: float | None) -> dict[str, Any]:
    return {
        "run": run.name,
        "directory": None if run.directory is None else str(run.directory),
        "user": None if run.origin is None else run.origin.user,
        "host": None if run.origin is None else run.origin.host,
        "heard_seconds_ago": run.heard_seconds_ago,
        "state": run.state,
        "outcome": run.outcome or None,
        "model": None if run.plan is None else run.plan.model,
        "strategy": None if run.plan is None else run.plan.strategy,
        "device": run.device,
        "ranks": run.ranks,
        "began": run.began,
        "seconds": run.held_seconds,
        "productive_seconds": run.productive_seconds,
        "goodput": run.goodput,
        "device_hours": run.device_hours,
        "usd": run.usd(price),
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "step_seconds": run.step_seconds,
        "tokens_per_second": run.tokens_per_second,
        "samples_per_second": run.samples_per_second,
        "peak_bytes": run.peak_bytes,
        "restarts": run.restarts,
        "checkpoint_step": run.checkpoint_step,
        "checkpoint_age_seconds": run.checkpoint_age_seconds,
        "quiet_seconds": run.quiet_seconds,
        "alerts": dict(run.alerts),
        "reason": run.last_words or None,
    }
