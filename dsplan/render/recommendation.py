"""Ranked plans as a table, what was rejected and why, and remedies when nothing fits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dsplan.render.blocks import Bar, Block, Cell, Table, Text, columns
from dsplan.render.plan_view import describe, dims_text, header, limit_bytes, verdict_line
from hardware_db.units import format_seconds, gib
from planner.plan import Plan
from planner.plan_io import plan_to_dict
from planner.search import Recommendation
from planner.workload import Workload


def recommendation_blocks(answer: Recommendation) -> list[Block]:
    """Model, hardware and work; the ranked plans or the closest miss with remedies; the strategies that lost."""
    shown = answer.plans[0] if answer.plans else answer.closest
    blocks: list[Block] = [] if shown is None else header(shown, answer.request.defaults)
    blocks += [Text(text=_work(answer.request.workload)), Text(text="")]
    blocks += [plans_table(answer.plans), *_footnotes(answer)] if answer.plans else _nothing_fits(answer)
    return blocks + _rejected(answer)


def recommendation_to_dict(answer: Recommendation) -> dict[str, Any]:
    """What `recommend --json` prints: `plans` best first and `rejected`; `closest` and `remedies` when nothing fits."""
    return {
        "schema_version": answer.plans[0].schema_version if answer.plans else 1,
        "plans": [plan_to_dict(plan) for plan in answer.plans],
        "rejected": [{"strategy": item.strategy, "reason": item.reason} for item in answer.rejected],
        "closest": None if answer.closest is None else plan_to_dict(answer.closest),
        "remedies": [{"change": item.change, "flag": item.flag, "plan": item.plan} for item in answer.remedies],
        "defaults": list(answer.request.defaults),
    }


def plans_table(plans: tuple[Plan, ...]) -> Table:
    """One row per plan, best first."""
    rows = [_row(rank, plan) for rank, plan in enumerate(plans, start=1)]
    if all(plan.configuration.offload == "none" for plan in plans):
        for row in rows:
            del row["offload"]
    return Table(columns=columns(*rows[0]), rows=[list(row.values()) for row in rows])


def alternatives_table(plan: Plan) -> list[Block]:
    """What a plan was chosen over, as its file remembers it."""
    if not plan.alternatives:
        return []
    rows = [[str(item.get("strategy", "")), str(item.get("reason", ""))] for item in plan.alternatives]
    return [Table(title="chosen over", columns=columns("strategy", "why not"), rows=rows)]


def _row(rank: int, plan: Plan) -> dict[str, Cell]:
    configuration, memory, rates = plan.configuration, plan.memory, plan.throughput
    return {
        "#": f"{rank}{'' if plan.runnable else '*'}",
        "strategy": configuration.strategy,
        "degrees": dims_text(configuration),
        "batch": f"{configuration.micro_batch_size}x{configuration.gradient_accumulation_steps}",
        "recompute": configuration.activation_checkpointing,
        "offload": configuration.offload,
        ">GiB": f"{gib(memory.device_used_bytes):.1f}",
        "memory": Bar(share=memory.device_used_upper_bytes / limit_bytes(plan), width=6),
        ">step": format_seconds(plan.time.step_seconds),
        ">tokens/s": f"{rates.tokens_per_second_per_gpu:,.0f}",
        "?>MFU": "-" if rates.mfu is None else f"{rates.mfu:.0%}",
        "limit": plan.limited_by,
    }


def _footnotes(answer: Recommendation) -> list[Block]:
    plans = answer.plans
    capacity = gib(limit_bytes(plans[0]))
    runners = sorted({plan.configuration.backend for plan in plans})
    note = (
        f"batch: micro-batch x accumulation; memory: upper bound of {capacity:.1f} GiB; tokens/s: per GPU;"
        f" limit: the largest part of a step; run by {' and '.join(runners)}"
    )
    notes: list[Block] = [Text(text=note, style="faint")]
    if answer.request.objective == "throughput" and not _by_time(plans):
        notes.append(Text(text="a simpler plan goes first unless another is clearly faster", style="faint"))
    if any(not plan.runnable for plan in plans):
        notes.append(Text(text="* can be emitted for other trainers; dsplan run cannot run it yet", style="faint"))
    return notes + [Text(text=f"note: {note}", style="warning") for note in _shared_notes(plans)]


def _shared_notes(plans: tuple[Plan, ...]) -> list[str]:
    """What is said of every plan, and so of the model or the question rather than of one configuration."""
    return [note for note in plans[0].notes if all(note in plan.notes for plan in plans)]


def _by_time(plans: tuple[Plan, ...]) -> bool:
    """Whether the plans stand in the order of their step times, small differences aside."""
    seconds = [plan.time.step_seconds for plan in plans]
    return all(later > 0.99 * earlier for earlier, later in pairwise(seconds))


def _work(workload: Workload) -> str:
    words = [workload.task, f"sequence {workload.sequence_length}", f"global batch {workload.global_batch_size}"]
    return ", ".join([*words, workload.precision, workload.optimizer, f"{workload.attention} attention"])


def _nothing_fits(answer: Recommendation) -> list[Block]:
    blocks: list[Block] = [Text(text="no plan fits", style="bad")]
    if answer.closest is not None:
        blocks.append(Text(text=f"closest: {describe(answer.closest.configuration)}"))
        blocks.append(Text(text=verdict_line(answer.closest)))
    for number, item in enumerate(answer.remedies, start=1):
        blocks.append(Text(text=f"  {number}. {item.change} ({item.flag}): {item.plan}"))
    if not answer.remedies:
        blocks.append(Text(text="no single change that was tried makes it fit; combine a smaller model with more GPUs"))
    return blocks


def _rejected(answer: Recommendation) -> list[Block]:
    if not answer.rejected:
        return []
    rows = [[item.strategy, item.reason] for item in answer.rejected]
    return [Table(title="not shown above", columns=columns("strategy", "why"), rows=rows)]
