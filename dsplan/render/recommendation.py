"""Ranked plans as a table, why the first is first, what was rejected and why, and remedies when nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsplan.render.failures_view import failures_note, failures_to_dict
from dsplan.render.plan_view import (
    describe,
    dims_text,
    header,
    interval_text,
    limit_bytes,
    needed_bytes,
    offload_text,
    rollout_text,
    shown_rate,
    shown_unit,
    verdict_line,
)
from dsplan.render.show import Block, Text, explain_columns
from dsplan.render.table_columns import Bar, Cell, Table, columns
from hardware_db.units import DAY_SECONDS, common_unit, format_count, format_seconds, gib, three_digits
from planner.cluster.budget import Bill, bill_of
from planner.search.device_counts import OnDevices
from planner.search.request import Request
from planner.search.search import Recommendation
from planner.types.job import Workload
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import plan_to_dict

if TYPE_CHECKING:
    from planner.search.scaling import Rate

_SCALING_BAR = 30

# Costs of plans as columns, tables and JSON.


def bill(request: Request, plan: Plan) -> Bill:
    """Return the bill of a plan for the request's price and tokens."""
    return bill_of(plan.configuration, plan.time.step_seconds, request.usd_per_gpu_hour, request.budget)


def bill_cells(request: Request, plan: Plan) -> dict[str, Cell]:
    """Return the columns that the question asks for: none where it asks neither for cost nor for a number of tokens."""
    cost, cells = bill(request, plan), dict[str, Cell]()
    if cost.usd_per_million_tokens is not None:
        cells[">$/Mtoken"] = f"{cost.usd_per_million_tokens:.3g}"
    elif request.objective == "cost":
        cells[">GPU-h/Mtoken"] = f"{cost.gpu_hours_per_million_tokens:.3g}"
    if cost.days is not None:
        cells[">days"] = three_digits(cost.days)
    if cost.usd is not None:
        cells[">total"] = f"${cost.usd:,.0f}"
    return cells


def price_note(request: Request) -> list[Block]:
    """Return where the price comes from, where there is one."""
    price, node = request.usd_per_gpu_hour, request.cluster.node_type
    if price is None:
        asks = request.objective == "cost"
        return [Text(text="no price is known: plans are ranked by GPU-hours (--price)", style="faint")] if asks else []
    if request.budget.usd_per_gpu_hour is not None or not node:
        return [Text(text=f"at ${price:g} per GPU-hour", style="faint")]
    from hardware_db.datasheets import find_node_type
    from planner.cluster.nodes import price_per_gpu

    kind = find_node_type(node)
    listed = price == price_per_gpu(kind)
    source = f"list price of {node} on {kind.priced_on}; --price takes yours" if listed else "from the cluster file"
    return [Text(text=f"at ${price:.3g} per GPU-hour, {source}", style="faint")]


def devices_table(answer: Recommendation) -> list[Block]:
    """On which numbers of GPUs the training ends in time; nothing without a deadline."""
    if not answer.on_devices:
        return []
    rows = [_devices_row(devices) for devices in answer.on_devices]
    deadline = answer.request.budget.deadline_days or 0.0
    title = f"the same training on other numbers of GPUs; in time is {format_seconds(deadline * DAY_SECONDS)}"
    return [Table(title=title, columns=columns(*rows[0]), rows=[list(row.values()) for row in rows])]


def devices_to_dicts(answer: Recommendation) -> list[dict[str, Any]]:
    """Return the best plan of each number of devices as `recommend --json` prints them."""
    return [
        {
            "gpus": devices.gpus,
            "strategy": devices.plan.configuration.strategy,
            "step_seconds": devices.plan.time.step_seconds,
            "in_time": devices.in_time,
            **asdict(devices.bill),
        }
        for devices in answer.on_devices
    ]


def _devices_row(devices: OnDevices) -> dict[str, Cell]:
    configuration = devices.plan.configuration
    return {
        ">GPUs": str(devices.gpus),
        "strategy": configuration.strategy,
        "?degrees": dims_text(configuration),
        ">step": format_seconds(devices.plan.time.step_seconds),
        ">days": "-" if devices.bill.days is None else three_digits(devices.bill.days),
        ">total": "-" if devices.bill.usd is None else f"${devices.bill.usd:,.0f}",
        "in time": "yes" if devices.in_time else "no",
    }


# How throughput grows with the GPUs (`recommend --plot`).


def scaling_table(rates: Sequence[Rate], title: str = "", bar: int = 0) -> Table:
    """Return a row for each number of GPUs; with `bar`, one of so many characters for the throughput of all of them."""
    fastest = max(rate.per_second for rate in rates)
    counted = _unit_of_work(rates[0].plan)
    drawn = ["all GPUs"] if bar else []
    rate_names = (*drawn, f">{counted}/s", ">of linear")
    names = columns(">GPUs", "?strategy", "??degrees", "??>global batch", "?>step", *rate_names)
    rows: list[list[Cell]] = []
    for rate in rates:
        chosen = rate.plan.configuration
        bars: list[Cell] = [Bar(share=rate.per_second / fastest, width=bar, of_limit=False)] if bar else []
        words = [str(chosen.world_size), chosen.strategy, dims_text(chosen), str(chosen.global_batch_size)]
        rate_words = [format_count(rate.per_second), f"{rate.of_linear:.0%}"]
        rows.append([*words, format_seconds(rate.plan.time.step_seconds), *bars, *rate_words])
    return Table(columns=names, rows=rows, title=title)


def scaling_blocks(rates: Sequence[Rate]) -> list[Block]:
    """Return the curve over GPUs as bars, and what they mean."""
    if len(rates) < 2:
        where = "on another number of GPUs that was tried" if rates else "here"
        return [Text(text=f"nothing to plot: no plan fits {where}", style="warning")]
    growing = len({rate.plan.configuration.global_batch_size for rate in rates}) > 1
    batch = "the global batch grows with the GPUs (--global-batch holds it)" if growing else "the same global batch"
    note = f"the first plan on each number of GPUs; {batch}; of linear: against {_gpus(rates[0])} times as many"
    return [scaling_table(rates, "throughput over GPUs", bar=_SCALING_BAR), Text(text=note, style="faint")]


def scaling_to_dicts(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    """Return what `recommend --plot --json` adds."""
    return [
        {
            "gpus": rate.plan.configuration.world_size,
            "strategy": rate.plan.configuration.strategy,
            "global_batch_size": rate.plan.configuration.global_batch_size,
            "step_seconds": rate.plan.time.step_seconds,
            f"{_unit_of_work(rate.plan)}_per_second": rate.per_second,
            "of_linear": rate.of_linear,
        }
        for rate in rates
    ]


def _gpus(rate: Rate) -> str:
    count = rate.plan.configuration.world_size
    return f"{count} GPU{'s' * (count != 1)}"


def _groups(answer: Recommendation) -> list[Block]:
    """Return nodes that differ, and what training is without each group of them; nothing where all are alike."""
    if answer.uneven is None:
        return []
    from dsplan.render.groups_view import groups_blocks

    return groups_blocks(answer.uneven)


def _uneven_to_dict(answer: Recommendation) -> dict[str, Any] | None:
    if answer.uneven is None:
        return None
    from dsplan.render.groups_view import uneven_to_dict

    return uneven_to_dict(answer.uneven)


def recommendation_blocks(answer: Recommendation) -> list[Block]:
    """Model, hardware and work; the ranked plans or the closest miss with remedies; the strategies that lost."""
    shown = answer.plans[0] if answer.plans else answer.closest
    blocks: list[Block] = [] if shown is None else header(shown, answer.request.defaults)
    blocks += [Text(text=work_text(answer.request.workload)), Text(text="")]
    return [*blocks, *ranked_blocks(answer), *rejected_blocks(answer)]


def ranked_blocks(answer: Recommendation) -> list[Block]:
    """Return the ranked plans and what their figures mean, or the closest miss with remedies."""
    if answer.plans:
        table = plans_table(answer.request, answer.plans)
        blocks = [*_advice(answer), table, *_footnotes(answer)]
    else:
        blocks = _nothing_fits(answer)
    return [*blocks, *_groups(answer), *devices_table(answer), *_front(answer)]


def recommendation_to_dict(answer: Recommendation) -> dict[str, Any]:
    """Return what `recommend --json` prints: `plans` best first, `choice`, `rejected`.

    `closest` and `remedies` when nothing fits, and `remedies` beside plans that offload; `on_devices` with a deadline,
    `front` where it was asked for, `uneven` null but where nodes differ.
    """
    return {
        "schema_version": answer.plans[0].schema_version if answer.plans else 1,
        "plans": [_plan_to_dict(answer.request, plan) for plan in answer.plans],
        "choice": answer.choice,
        "rejected": [{"strategy": item.strategy, "reason": item.reason} for item in answer.rejected],
        "closest": None if answer.closest is None else _plan_to_dict(answer.request, answer.closest),
        "remedies": [{"change": item.change, "flag": item.flag, "plan": item.plan} for item in answer.remedies],
        "advice": [asdict(item) for item in answer.advice()],
        "on_devices": devices_to_dicts(answer),
        "front": [_plan_to_dict(answer.request, plan) for plan in answer.front],
        "uneven": _uneven_to_dict(answer),
        "defaults": list(answer.request.defaults),
    }


def plans_table(request: Request, plans: Sequence[Plan], title: str = "") -> Table:
    """One row per plan, best first."""
    unit = common_unit(plan.time.step_seconds for plan in plans)
    rows = [_row(rank, plan, unit) | bill_cells(request, plan) for rank, plan in enumerate(plans, start=1)]
    if all(plan.configuration.offload == "none" for plan in plans):
        for row in rows:
            del row["?offload"]
    return Table(title=title, columns=columns(*rows[0]), rows=[list(row.values()) for row in rows])


def alternatives_table(plan: Plan) -> list[Block]:
    """Return what a plan was chosen over, as its file remembers it."""
    if not plan.alternatives:
        return []
    rows = [[str(item.get("strategy", "")), str(item.get("reason", ""))] for item in plan.alternatives]
    return [Table(title="chosen over", columns=columns("strategy", "why not"), rows=rows)]


def _row(rank: int, plan: Plan, unit: tuple[str, float] | None) -> dict[str, Cell]:
    configuration, rates = plan.configuration, plan.throughput
    return {
        "#": f"{rank}{'' if plan.runnable else '*'}",
        "strategy": configuration.strategy,
        "?degrees": dims_text(configuration),
        "?batch": _batch_text(configuration),
        "??recompute": configuration.activation_checkpointing,
        **({"?generation": generation} if (generation := rollout_text(plan.workload)) else {}),
        "?offload": offload_text(configuration),
        ">GiB": f"{gib(needed_bytes(plan)):.1f}",
        "???memory": Bar(share=needed_bytes(plan) / limit_bytes(plan), width=6),
        ">step": format_seconds(plan.time.step_seconds, unit),
        "????>9 of 10": interval_text(plan.time, unit),
        f"?>{shown_unit(plan)}/s": f"{shown_rate(plan):,.{0 if shown_rate(plan) >= 10 else 2}f}",
        "????>MFU": "-" if rates.mfu is None else f"{rates.mfu:.0%}",
        "??limit": plan.limited_by,
    }


def _batch_text(configuration: Configuration) -> str:
    """Return micro-batch x accumulation; the least and the largest micro-batch where ranks have unlike ones."""
    sizes = {size for _, size in configuration.shares}
    micro = str(configuration.micro_batch_size) if len(sizes) == 1 else f"{min(sizes)}-{max(sizes)}"
    return f"{micro}x{configuration.gradient_accumulation_steps}"


def _unit_of_work(plan: Plan) -> str:
    return "samples" if plan.configuration.counts_samples else "tokens"


_ORDERED_BY = {"throughput": "step time", "memory": "memory", "cost": "cost"}


def _footnotes(answer: Recommendation) -> list[Block]:
    plans = answer.plans
    capacity = gib(limit_bytes(plans[0]))
    runners = sorted({plan.configuration.backend for plan in plans})
    unit = f"{shown_unit(plans[0])}/s"
    parts = (
        ("batch", "batch: micro-batch x accumulation"),
        ("GiB", f"GiB: what a device needs of its {capacity:.1f}, which decides; caches of torch may show more"),
        ("9 of 10", "9 of 10: where nine of ten steps should lie"),
        (unit, f"{unit}: per GPU"),
        ("limit", "limit: the largest part of a step"),
        ("", f"after the first by {_ORDERED_BY[answer.request.objective]}"),
        ("", f"run by {' and '.join(runners)}"),
    )
    notes: list[Block] = [Text(text=f"first: {answer.choice}"), explain_columns(parts)]
    notes += [*price_note(answer.request), *failures_note(answer.request, plans[0])]
    measured = [describe(plan.configuration) for plan in plans if plan.time.predicted_step_seconds is not None]
    notes += [Text(text=f"step measured here before: {name}", style="faint") for name in measured]
    if any(not plan.runnable for plan in plans):
        trainers = "torchtitan, Megatron-LM, NeMo or nanotron"
        text = f"* dsplan run cannot run it yet; dsplan emit writes it for {trainers} where they have its strategy"
        notes.append(Text(text=text, style="faint"))
    return notes + [Text(text=f"note: {note}", style="warning") for note in _shared_notes(plans)]


def _shared_notes(plans: tuple[Plan, ...]) -> list[str]:
    """Return what is said of every plan, and so of the model or the question rather than of one configuration."""
    return [note for note in plans[0].notes if all(note in plan.notes for plan in plans)]


def _front(answer: Recommendation) -> list[Block]:
    what = "cost" if answer.request.objective == "cost" else "step time"
    title = f"no plan beats one of these in {what}, memory and number of GPUs at once"
    return [plans_table(answer.request, answer.front, title)] if answer.front else []


def _plan_to_dict(request: Request, plan: Plan) -> dict[str, Any]:
    return plan_to_dict(plan) | {"cost": asdict(bill(request, plan)), "failures": failures_to_dict(request, plan)}


_TASK_WORDS = {"custom": "the module's own task"}


def work_text(workload: Workload) -> str:
    """Return what is trained how, in one line."""
    unit = "patches an image" if workload.task == "diffusion" else ""
    length = [f"{workload.sequence_length} {unit}" if unit else f"sequence {workload.sequence_length}"]
    length = [] if workload.sequence_length == 1 else length
    words = [_TASK_WORDS.get(workload.task, workload.task), *length, f"global batch {workload.global_batch_size}"]
    if workload.post is not None and workload.generates:
        post = workload.post
        words.append(f"rounds of {post.prompts_per_step} prompts x {post.generations} completions")
        words.append(f"{post.completion_length} tokens each on average")
    return ", ".join([*words, workload.precision, workload.optimizer, f"{workload.attention} attention"])


def _advice(answer: Recommendation) -> list[Block]:
    """Return what would help more than another plan, and what trains on the devices alone where the plans offload."""
    lines = [f"{item.change} ({item.flag}): {item.gain}" for item in answer.advice()]
    lines += [f"{item.change} ({item.flag}): {item.plan}" for item in answer.remedies]
    return [Text(text=f"advice: {line}", style="good") for line in lines]


def _nothing_fits(answer: Recommendation) -> list[Block]:
    no_plan = answer.no_plan()
    blocks: list[Block] = [Text(text=no_plan.headline, style="bad")]
    if answer.closest is not None:
        blocks.append(Text(text=f"closest: {describe(answer.closest.configuration)}{no_plan.takes}"))
        blocks.append(Text(text=verdict_line(answer.closest)))
    return blocks + [Text(text=step) for step in no_plan.steps]


def rejected_blocks(answer: Recommendation) -> list[Block]:
    """Return why each of the other strategies is not among the plans."""
    if not answer.rejected:
        return []
    rows = [[item.strategy, item.reason] for item in answer.rejected]
    return [Table(title="not shown above", columns=columns("strategy", "why"), rows=rows)]
