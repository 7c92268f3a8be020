"""Failures ahead of a plan: in a line of `recommend`, in its JSON, and as the text that months of it begin with."""

from __future__ import annotations

import math
from typing import Any

from dsplan.render.show import Block, Text
from hardware_db.units import format_bytes, format_seconds, three_digits
from planner.cluster.budget import bill_of
from planner.cost.failures import Outlook, outlook
from planner.search.estimate import job_of
from planner.search.request import Request
from planner.types.plan import Plan

WORTH_A_LINE = 0.99
"""A plan of which failures leave less of the throughput than this is said to be one."""
_TOLD_APART = 0.001


def outlook_of(request: Request, plan: Plan) -> Outlook | None:
    """Return what failures make of a plan of a request; None where no rate of failures is known."""
    return outlook(job_of(request, plan.configuration), plan.time.step_seconds)


def failures_to_dict(request: Request, plan: Plan) -> dict[str, Any] | None:
    """Return what `recommend --json` says of failures; None where no rate of them is known."""
    ahead = outlook_of(request, plan)
    if ahead is None:
        return None
    low, high = ahead.goodput_range
    days, usd = _bill(request, plan, ahead)
    return {
        **rates_to_dict(ahead),
        "checkpoint_seconds": finite(ahead.interval_seconds),
        "goodput": ahead.goodput,
        "goodput_low": low,
        "goodput_high": high,
        "days": days,
        "usd": usd,
    }


def failures_note(request: Request, plan: Plan) -> list[Block]:
    """Return what failures make of the first plan, where that is worth a line."""
    ahead = outlook_of(request, plan)
    if ahead is None or ahead.goodput >= WORTH_A_LINE:
        return []
    days, usd = _bill(request, plan, ahead)
    words = f"failures: {rate_text(ahead)}; {checkpoint_text(ahead)} leave {share(ahead)} of the first plan's speed"
    if days is not None:
        words += f", {three_digits(days)} days" + ("" if usd is None else f" and ${usd:,.0f}")
    return [Text(text=words, style="warning")]


def _bill(request: Request, plan: Plan, ahead: Outlook) -> tuple[float | None, float | None]:
    """Return days and dollars of the whole training with its failures, where they are known."""
    bill, left = (
        bill_of(plan.configuration, plan.time.step_seconds, request.usd_per_gpu_hour, request.budget),
        ahead.goodput,
    )
    days, usd = (None if each is None or not left else each / left for each in (bill.days, bill.usd))
    return days, usd


def rates_to_dict(ahead: Outlook) -> dict[str, Any]:
    """Return the rates as JSON has them."""
    return {
        "per_1000_node_days": ahead.per_1000_node_days,
        "least_per_1000_node_days": ahead.least_per_1000_node_days,
        "most_per_1000_node_days": ahead.most_per_1000_node_days,
        "source": ahead.said,
        "mttf_seconds": finite(ahead.mttf_seconds),
        "restart_seconds": ahead.restart_seconds,
        "checkpoint_bytes": round(ahead.checkpoint_bytes),
        "save_seconds": ahead.save_seconds,
    }


def finite(number: float) -> float | None:
    """Return a number that JSON has, None for an infinite one."""
    return number if math.isfinite(number) else None


def rate_text(ahead: Outlook) -> str:
    """Return how often the job fails, and who says so."""
    if math.isinf(ahead.mttf_seconds):
        return f"no node fails ({ahead.said})"
    which = "the node" if ahead.nodes == 1 else f"one of {ahead.nodes:,} nodes"
    rate = ahead.per_1000_node_days
    times = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"
    return f"{which} fails every {format_seconds(ahead.mttf_seconds)} ({times} per 1,000 node-days: {ahead.said})"


def checkpoint_text(ahead: Outlook) -> str:
    """Return how often it is saved for that."""
    size, save = format_bytes(ahead.checkpoint_bytes), format_seconds(ahead.save_seconds)
    every, restart = format_seconds(ahead.interval_seconds), format_seconds(ahead.restart_seconds)
    return f"{size} saved in {save} every {every} and {restart} to restart"


def share(ahead: Outlook) -> str:
    """Return the share of the throughput that is left, and what others' rates leave."""
    low, high = ahead.goodput_range
    between = f" ({low:.1%} to {high:.1%} at rates that others saw)" if high - low >= _TOLD_APART else ""
    return f"{ahead.goodput:.1%}{between}"
