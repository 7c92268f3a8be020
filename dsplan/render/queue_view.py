"""Plans by when they would end in a queue, as a table and JSON (`dsplan queue`)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from dsplan.queueing import Queue, Turn
from dsplan.render.plan_view import header
from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Cell, Table, columns
from hardware_db.units import format_seconds, three_digits
from planner.emit.common import node_layout
from planner.search.request import Request
from planner.search.search import describe

_TIME = "%Y-%m-%d %H:%M"


def queue_blocks(request: Request, state: Queue, turns: Sequence[Turn], now: datetime) -> list[Block]:
    """Return the plans, the one that ends first at the top, and why others get no nodes."""
    jobs = "1 job waits" if state.waiting == 1 else f"{state.waiting:,} jobs wait"
    largest = max(turns, key=lambda turn: turn.plan.configuration.world_size)
    blocks = [*header(largest.plan, request.defaults), Text(text="")]
    blocks.append(Text(text=f"{jobs}; {state.idle:,} of {state.nodes:,} nodes idle"))
    blocks.append(
        Table(
            title="",
            columns=columns(">GPUs", ">nodes", "strategy", ">step", ">trains", ">starts in", ">ends", ">GPU-hours"),
            rows=[_row(turn, now) for turn in turns],
        )
    )
    for turn in turns:
        if turn.refusal:
            blocks.append(Text(text=f"{_devices(turn, request)}: {turn.refusal}", style="bad"))
    first = turns[0]
    if first.ends is not None:
        text = f"first to end: {describe(first.plan)} on {_devices(first, request)}, {first.ends:{_TIME}}"
        blocks.append(Text(text=text, style="heading"))
    note = "starts: as sbatch --test-only says now; trains: --tokens at the predicted step, without failures"
    return [*blocks, Text(text=note, style="faint")]


def _devices(turn: Turn, request: Request) -> str:
    return f"{turn.plan.configuration.world_size} x {request.cluster.device.name}"


def _row(turn: Turn, now: datetime) -> list[Cell]:
    waits = "refused" if turn.starts is None else format_seconds(max((turn.starts - now).total_seconds(), 0.0))
    ends = "-" if turn.ends is None else f"{turn.ends:{_TIME}}"
    step, trains = format_seconds(turn.plan.time.step_seconds), format_seconds(turn.train_seconds)
    nodes, _ = node_layout(turn.plan)
    gpus = str(turn.plan.configuration.world_size)
    return [gpus, str(nodes), describe(turn.plan), step, trains, waits, ends, three_digits(turn.gpu_hours)]


def queue_to_dict(state: Queue, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return what `queue --json` prints; times are this machine's, in ISO 8601."""
    return {
        "schema_version": turns[0].plan.schema_version,
        "model": turns[0].plan.model["name"],
        "waiting_jobs": state.waiting,
        "nodes": state.nodes,
        "idle_nodes": state.idle,
        "turns": [_turn_to_dict(turn) for turn in turns],
    }


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    return {
        "gpus": turn.plan.configuration.world_size,
        "nodes": node_layout(turn.plan)[0],
        "strategy": describe(turn.plan),
        "step_seconds": turn.plan.time.step_seconds,
        "train_seconds": turn.train_seconds,
        "limit_minutes": turn.limit_minutes,
        "gpu_hours": turn.gpu_hours,
        "starts": None if turn.starts is None else turn.starts.isoformat(),
        "ends": None if turn.ends is None else turn.ends.isoformat(timespec="seconds"),
        "partition": turn.partition or None,
        "refusal": turn.refusal or None,
    }
