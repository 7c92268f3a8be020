"""Months of a plan on a cluster that fails, as tables and JSON (`dsplan simulate`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dsplan.render.failures_view import finite, rate_text, rates_to_dict
from dsplan.render.plan_view import describe, header, shown_unit
from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Bar, Cell, Table, columns
from hardware_db.units import DAY_SECONDS, format_bytes, format_count, format_seconds, three_digits
from planner.cluster.budget import HOUR, bill_of
from planner.fleet.month import Kind
from planner.fleet.scenario import Circumstances, Scene
from planner.search.request import Request
from planner.types.plan import Plan

_BAR = 24
WORDS: Mapping[Kind, str] = {
    "training": "steps that stay",
    "slow": "slow or missing nodes",
    "lost": "steps lost",
    "saving": "saving",
    "restarting": "restarting",
    "waiting": "waiting for nodes",
    "preempted": "preempted",
}
"""What the time of a month goes to, for people."""


def scene_blocks(
    request: Request, plan: Plan, seen: Scene, sizes: Sequence[Scene], circumstances: Circumstances
) -> list[Block]:
    """Return where the time of the months went, what is left of the throughput, and the same on other sizes."""
    ahead = seen.outlook
    blocks = [*header(plan, request.defaults), Text(text=describe(plan.configuration)), Text(text="")]
    blocks.append(Text(text=f"{rate_text(ahead)}; {_save_text(seen)}"))
    blocks.append(_time_table(seen, circumstances))
    low, high = seen.spread
    rate = plan.throughput.tokens_per_second_per_gpu * plan.configuration.world_size
    between = f" ({low:.1%} to {high:.1%} in {len(seen.months)} of them)" if len(seen.months) > 1 else ""
    left = f"goodput {seen.goodput:.1%}{between}"
    of_all = f"{format_count(rate * seen.goodput)} of {format_count(rate)} {shown_unit(plan)}/s"
    blocks.append(Text(text=f"{left}: {of_all}", style="heading"))
    blocks += _nothing_stays(seen)
    blocks += _bill_text(request, plan, seen)
    blocks.append(_sizes_table(sizes, request.cluster.gpus_per_node))
    blocks.append(Text(text="formula: failures alone, with a spare node always free", style="faint"))
    return [*blocks, *_parts_text([seen, *sizes], circumstances, request.cluster.gpus_per_node)]


_NOTHING = 0.0005
"""Goodput below which nothing is said to be left: it is shown as 0.0 %."""


def _nothing_stays(seen: Scene) -> list[Block]:
    """Return why no step stays, where none does."""
    if seen.goodput >= _NOTHING:
        return []
    ahead = seen.outlook
    until_safe = seen.fleet.interval_seconds + seen.fleet.save_seconds
    words = f"hardly a step stays: a restart takes {format_seconds(ahead.restart_seconds)}"
    words += "" if math.isinf(until_safe) else f" and the steps up to a checkpoint {format_seconds(until_safe)}"
    words += (
        "" if math.isinf(ahead.mttf_seconds) else f", and a failure comes every {format_seconds(ahead.mttf_seconds)}"
    )
    return [Text(text=words, style="bad")]


def _parts_text(scenes: Sequence[Scene], circumstances: Circumstances, gpus_per_node: int) -> list[Block]:
    """Return on how many GPUs too much happens for all of a month to be simulated, and how much of it was."""
    parts = {scene.fleet.nodes * gpus_per_node: scene.simulated_seconds for scene in scenes}
    cut = {gpus: part for gpus, part in parts.items() if part < (1 - _NOTHING) * circumstances.days * DAY_SECONDS}
    if not cut:
        return []
    each = ", ".join(f"{format_seconds(cut[gpus])} on {gpus:,}" for gpus in sorted(cut))
    words = "only the first part of each month is simulated, and the rest counts like it"
    return [Text(text=f"{words}: {each} GPUs", style="faint")]


def _save_text(seen: Scene) -> str:
    ahead, every = seen.outlook, seen.fleet.interval_seconds
    size, save = format_bytes(ahead.checkpoint_bytes), format_seconds(ahead.save_seconds)
    often = "never saved" if math.isinf(every) else f"saved every {format_seconds(every)}"
    return f"{size} in {save}, {often}; {format_seconds(ahead.restart_seconds)} to restart"


def _count_text(count: float, name: str) -> str:
    """Write a mean number of events, with a tenth where there are few."""
    number = f"{count:,.1f}" if 0 < count < 10 and count % 1 else f"{count:,.0f}"
    return f"{number} {name}" if number == "1" else f"{number} {name}s"


def _time_table(seen: Scene, circumstances: Circumstances) -> Table:
    whole = circumstances.days * DAY_SECONDS / HOUR
    rows: list[list[Cell]] = []
    for kind, words in WORDS.items():
        hours = seen.hours(kind)
        if hours:
            share = hours / whole
            rows.append([words, Bar(share=share, width=_BAR, of_limit=False), f"{share:.2%}", f"{hours:,.1f}"])
    happened = [_count_text(seen.failures, "failure")]
    for name in ("straggler", "preemption"):
        count = fmean(getattr(month, f"{name}s") for month in seen.months)
        happened += [_count_text(count, name)] if count else []
    mean = "one month" if len(seen.months) == 1 else f"the mean of {len(seen.months)}"
    title = f"{circumstances.days:g} days, {mean} simulated: {', '.join(happened)}"
    return Table(title=title, columns=columns("where the time goes", "?share", ">of all", ">hours"), rows=rows)


def _bill_text(request: Request, plan: Plan, seen: Scene) -> list[Block]:
    bill = bill_of(plan.configuration, plan.time.step_seconds, request.usd_per_gpu_hour, request.budget)
    if bill.days is None or not seen.goodput:
        return []
    days = f"the training takes {three_digits(bill.days / seen.goodput)} days instead of {three_digits(bill.days)}"
    cost = "" if bill.usd is None else f", ${bill.usd / seen.goodput:,.0f} instead of ${bill.usd:,.0f}"
    return [Text(text=days + cost)]


def _sizes_table(sizes: Sequence[Scene], gpus_per_node: int) -> Table:
    rows: list[list[Cell]] = []
    for other in sizes:
        ahead = other.outlook
        every, save = _or_never(other.fleet.interval_seconds), format_seconds(ahead.save_seconds)
        bar = Bar(share=other.goodput, width=_BAR, of_limit=False)
        shares = [f"{other.goodput:.1%}", f"{other.by_formula:.1%}"]
        fails = _or_never(ahead.mttf_seconds)
        rows.append([f"{ahead.nodes * gpus_per_node:,}", fails, every, save, bar, *shares])
    names = columns(">GPUs", ">a failure every", "?>saved every", "??>in", "???goodput", ">simulated", ">formula")
    return Table(title="the same steps and checkpoint on other numbers of GPUs", columns=names, rows=rows)


def _or_never(seconds: float) -> str:
    return "never" if math.isinf(seconds) else format_seconds(seconds)


def scene_to_dict(
    request: Request, plan: Plan, seen: Scene, sizes: Sequence[Scene], circumstances: Circumstances
) -> dict[str, Any]:
    """Return what `simulate --json` prints."""
    low, high = seen.spread
    chosen = plan.configuration
    return {
        "schema_version": plan.schema_version,
        "model": plan.model["name"],
        "gpus": chosen.world_size,
        "nodes": request.cluster.nodes,
        "strategy": chosen.strategy,
        "step_seconds": plan.time.step_seconds,
        "days": circumstances.days,
        "simulated_days": seen.simulated_seconds / DAY_SECONDS,
        "months": len(seen.months),
        "seed": circumstances.seed,
        "rates": rates_to_dict(seen.outlook),
        "checkpoint_seconds": finite(seen.fleet.interval_seconds),
        "goodput": seen.goodput,
        "goodput_low": low,
        "goodput_high": high,
        "goodput_by_formula": seen.by_formula,
        "tokens_per_second": plan.throughput.tokens_per_second_per_gpu * chosen.world_size * seen.goodput,
        "failures": seen.failures,
        "preemptions": fmean(month.preemptions for month in seen.months),
        "stragglers": fmean(month.stragglers for month in seen.months),
        "hours": {kind: seen.hours(kind) for kind in WORDS},
        "sizes": [
            {
                "gpus": other.outlook.nodes * request.cluster.gpus_per_node,
                "nodes": other.outlook.nodes,
                "mttf_seconds": finite(other.outlook.mttf_seconds),
                "checkpoint_seconds": finite(other.fleet.interval_seconds),
                "save_seconds": other.outlook.save_seconds,
                "simulated_days": other.simulated_seconds / DAY_SECONDS,
                "goodput": other.goodput,
                "goodput_by_formula": other.by_formula,
            }
            for other in sizes
        ],
    }
