"""What plans cost, as columns, tables and JSON: dollars, GPU-hours, days, and on how many GPUs a deadline is met."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dsplan.render.blocks import Block, Cell, Table, Text, columns
from dsplan.render.plan_view import dims_text
from hardware_db.units import format_days, format_seconds
from planner.budget import Bill, bill_of
from planner.deadline import OnDevices
from planner.plan import Plan
from planner.request import Request
from planner.search import Recommendation


def bill(request: Request, plan: Plan) -> Bill:
    """The bill of a plan for the request's price and tokens."""
    return bill_of(plan.configuration, plan.time.step_seconds, request.usd_per_gpu_hour, request.budget)


def bill_cells(request: Request, plan: Plan) -> dict[str, Cell]:
    """The columns that the question asks for: none where it asks neither for cost nor for a number of tokens."""
    one, cells = bill(request, plan), dict[str, Cell]()
    if one.usd_per_million_tokens is not None:
        cells[">$/Mtoken"] = f"{one.usd_per_million_tokens:.3g}"
    elif request.objective == "cost":
        cells[">GPU-h/Mtoken"] = f"{one.gpu_hours_per_million_tokens:.3g}"
    if one.days is not None:
        cells[">days"] = f"{one.days:.3g}"
    if one.usd is not None:
        cells[">total"] = f"${one.usd:,.0f}"
    return cells


def price_note(request: Request) -> list[Block]:
    """Where the price comes from, where there is one."""
    price, node = request.usd_per_gpu_hour, request.cluster.node_type
    if price is None:
        asks = request.objective == "cost"
        return [Text(text="no price is known: plans are ranked by GPU-hours (--price)", style="faint")] if asks else []
    if request.budget.usd_per_gpu_hour is not None or not node:
        return [Text(text=f"at ${price:g} per GPU-hour", style="faint")]
    from hardware_db.datasheets import find_node_type
    from planner.hardware.nodes import price_per_gpu

    known = find_node_type(node)
    listed = price == price_per_gpu(known)
    source = f"list price of {node} on {known.priced_on}; --price takes yours" if listed else "from the cluster file"
    return [Text(text=f"at ${price:.3g} per GPU-hour, {source}", style="faint")]


def devices_table(answer: Recommendation) -> list[Block]:
    """On which numbers of GPUs the training ends in time; nothing without a deadline."""
    if not answer.on_devices:
        return []
    rows = [_devices_row(one) for one in answer.on_devices]
    deadline = answer.request.budget.deadline_days or 0.0
    title = f"the same training on other numbers of GPUs; in time is {format_days(deadline)}"
    return [Table(title=title, columns=columns(*rows[0]), rows=[list(row.values()) for row in rows])]


def devices_to_dicts(answer: Recommendation) -> list[dict[str, Any]]:
    return [
        {
            "gpus": one.gpus,
            "strategy": one.plan.configuration.strategy,
            "step_seconds": one.plan.time.step_seconds,
            "in_time": one.in_time,
            **asdict(one.bill),
        }
        for one in answer.on_devices
    ]


def _devices_row(one: OnDevices) -> dict[str, Cell]:
    configuration = one.plan.configuration
    return {
        ">GPUs": str(one.gpus),
        "strategy": configuration.strategy,
        "degrees": dims_text(configuration),
        ">step": format_seconds(one.plan.time.step_seconds),
        ">days": f"{one.bill.days:.3g}",
        ">total": "-" if one.bill.usd is None else f"${one.bill.usd:,.0f}",
        "in time": "yes" if one.in_time else "no",
    }
