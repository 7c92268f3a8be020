"""Nodes that differ: the share of each group in a step, and what the others do without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsplan.render.show import Block
from dsplan.render.table_columns import Cell, Table, columns
from hardware_db.units import format_count, format_seconds, gib
from planner.cluster.groups import name_group
from planner.search.uneven import LeftOut, Uneven
from planner.search.uneven_parts import Part
from planner.types.plan import Plan


def groups_blocks(uneven: Uneven) -> list[Block]:
    """Return two tables: the groups' parts in the first plan, if that has unlike shares, and training without each."""
    blocks: list[Block] = []
    if uneven.shared is not None and uneven.is_first:
        blocks.append(_parts_table(uneven.shared.parts))
    if left_out := uneven.without():
        names = columns("left out", ">GPUs", "?strategy", "?>global batch", ">step", ">all GPUs", ">they add")
        rows = [_left_out_row(each) for each in left_out]
        blocks.append(Table(title="without some of the nodes", columns=names, rows=rows))
    return blocks


def _parts_table(parts: Sequence[Part]) -> Table:
    """Return what each group has: samples of a micro-batch, or blocks of the stages on it."""
    if parts[0].layers:
        names = columns("nodes", "stages", ">layers", ">GiB", ">of", ">at work")
        step = format_seconds(max(part.time.step_seconds for part in parts))
        title = f"the stages of each in plan 1, and for how long of a step of {step} it works"
        return Table(title=title, columns=names, rows=[_stages_row(part) for part in parts])
    names = columns("nodes", ">micro-batch", ">GiB", ">of", ">step")
    title = "the share of each in plan 1; a step is the longest of theirs"
    rows = [[*_named(part, str(part.samples)), format_seconds(part.time.step_seconds)] for part in parts]
    return Table(title=title, columns=names, rows=rows)


def _stages_row(part: Part) -> list[Cell]:
    first, last = part.stages[0], part.stages[-1]
    stages = str(first) if first == last else f"{first}-{last}"
    return [*_named(part, stages, str(part.layers)), format_seconds(part.at_work_seconds)]


def _named(part: Part, *share: str) -> list[Cell]:
    memory, device = part.priced.memory, part.priced.job.cluster
    needed, capacity = gib(memory.device_needed_bytes), gib(device.capacity_bytes)
    return [name_group(part.group), *share, f"{needed:.1f}", f"{capacity:.1f}"]


def _left_out_row(left_out: LeftOut) -> list[Cell]:
    plan, name = left_out.plan, name_group(left_out.group)
    if plan is None or left_out.gain is None:
        return [name, "-", "nothing fits", "-", "-", "-", "-"]
    chosen = plan.configuration
    return [
        name,
        str(chosen.world_size),
        chosen.strategy,
        str(chosen.global_batch_size),
        format_seconds(plan.time.step_seconds),
        f"{format_count(_per_second(plan))} {'samples' if chosen.counts_samples else 'tokens'}/s",
        f"{left_out.gain:+.0%}",
    ]


def _per_second(plan: Plan) -> float:
    """Return tokens of all GPUs per second, or samples where those are what counts."""
    rates = plan.throughput
    if plan.configuration.counts_samples:
        return rates.samples_per_second
    return rates.tokens_per_second_per_gpu * plan.configuration.world_size


def uneven_to_dict(uneven: Uneven) -> dict[str, Any]:
    """Return the object `uneven` of `recommend --json`."""
    parts = uneven.shared.parts if uneven.shared is not None else ()
    return {
        "is_first": uneven.is_first,
        "even_step_seconds": None if uneven.even is None else uneven.even.time.step_seconds,
        "uneven_step_seconds": None if uneven.plan is None else uneven.plan.time.step_seconds,
        "samples_step_seconds": None if uneven.by_samples is None else uneven.by_samples.step_seconds,
        "stages_step_seconds": None if uneven.by_stages is None else uneven.by_stages.step_seconds,
        "groups": [
            {
                "nodes": name_group(part.group),
                "micro_batch_size": part.samples,
                "stages": list(part.stages) if part.layers else None,
                "layers": part.layers or None,
                "device_needed_bytes": part.priced.memory.device_needed_bytes,
                "capacity_bytes": part.priced.job.cluster.capacity_bytes,
                "step_seconds": part.time.step_seconds,
            }
            for part in parts
        ],
        "without": [_left_out_to_dict(left_out) for left_out in uneven.without()],
    }


def _left_out_to_dict(left_out: LeftOut) -> dict[str, Any]:
    plan = left_out.plan
    return {
        "nodes": name_group(left_out.group),
        "gpus": None if plan is None else plan.configuration.world_size,
        "strategy": None if plan is None else plan.configuration.strategy,
        "global_batch_size": None if plan is None else plan.configuration.global_batch_size,
        "step_seconds": None if plan is None else plan.time.step_seconds,
        "samples_per_second": None if plan is None else plan.throughput.samples_per_second,
        "gain": left_out.gain,
    }
