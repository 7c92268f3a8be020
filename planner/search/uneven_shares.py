"""Samples of a micro-batch by the rate of each group of alike nodes.

A step of data parallelism ends when its slowest rank has. Each group is priced as if all nodes were like it, with its
own share of the micro-batch and between the links that all have: the longest of these steps is the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from planner.cost.code_bases import code_base
from planner.cost.combinations import why_refused
from planner.errors import ContradictoryRequest
from planner.search.device_counts import on_devices
from planner.search.estimate import adapted_of, price
from planner.search.request import Request
from planner.search.space import divisors
from planner.search.uneven_parts import Kind, Part, Shared, resized
from planner.types.plan import Configuration, Plan
from planner.types.shares import split_by_rate, write_sizes

if TYPE_CHECKING:
    from planner.search.search import Recommendation

Evenly = Callable[[Request], "Recommendation"]
"""The search over plans that give every rank as many samples."""

LAYOUTS = 8
"""Plans of each kind of node whose layouts are tried with unlike shares."""
SPLITS = 2
"""Times that a micro-batch is split, each by the seconds that the groups took with the shares before."""
WORTH_IT = 0.02
"""Share of a step that splitting again must save: shares in proportion to rates are right where time is linear."""
ROUNDS = 3
"""Numbers of accumulation steps that are tried of a layout, from the least with which it fits."""


def fastest_shares(kinds: Sequence[Kind], evenly: Evenly, plans: Sequence[Plan]) -> Shared | None:
    """Return the configuration of unlike shares with the shortest step; None where none fits or may be."""
    request = kinds[0].request
    workload = request.workload
    may = code_base(workload.code).runs_here and not workload.generates and request.micro_batch is None
    if request.objective == "memory" or not may:
        return None
    every = (shared for layout in _layouts(kinds, evenly, plans) for shared in _fitting(kinds, layout))
    return min(every, key=lambda shared: shared.step_seconds, default=None)


def _layouts(kinds: Sequence[Kind], evenly: Evenly, plans: Sequence[Plan]) -> tuple[Configuration, ...]:
    """Return ways to spread the model: those of `plans`, and of the best plans if all nodes were like one group's.

    DeepSpeed gives every rank as many samples, so that ZeRO is our own.
    """
    every, request = list(plans), kinds[0].request
    for kind in kinds:
        option = replace(on_devices(kind.request, kind.request.cluster), top=LAYOUTS, zero_backend="native")
        with suppress(ContradictoryRequest):
            every += evenly(option).plans
    layouts: dict[Configuration, None] = {}
    for chosen in (resized(plan.configuration, 1, 1) for plan in every):
        layout = replace(chosen, backend="native") if chosen.zero_stage else chosen
        splits_groups = any(kind.group.gpus % layout.sharing for kind in kinds)
        refused = layout.pp * layout.ep > 1 or why_refused(layout, adapted_of(request.workload))
        if layout.world_size == request.cluster.gpus and not splits_groups and not refused:
            layouts[layout] = None
    return tuple(layouts)


def _fitting(kinds: Sequence[Kind], layout: Configuration) -> Iterator[Shared]:
    """Yield a layout with unlike shares, at the fewest accumulation steps with which it fits and a few more."""
    request = kinds[0].request
    batch, ranks = request.workload.global_batch_size, layout.dims.data_parallel
    steps = [step for step in divisors(batch) if batch // step >= ranks]
    shares = cache(partial(_share, kinds, layout))

    def fitting(step: int) -> Shared | None:
        shared = shares(step)
        return shared if shared is not None and shared.fits(request) else None

    fewest = bisect_left(steps, True, key=lambda step: fitting(step) is not None)
    for step in dict.fromkeys((*steps[:1], *steps[fewest : fewest + ROUNDS])):
        shared = fitting(step)
        if shared is not None and shared.configuration.is_uneven:
            yield shared


def _share(kinds: Sequence[Kind], layout: Configuration, accumulation: int) -> Shared | None:
    """Return a layout whose ranks have samples in proportion to their rates; None where these are too few.

    Of devices of one kind the rates are their speeds. Of others they are samples over seconds of an even share, and
    then of the share that follows, since a few samples take more time each than many.
    """
    batch = kinds[0].request.workload.global_batch_size
    together, ranks = batch // accumulation, [kind.group.gpus // layout.sharing for kind in kinds]
    sizes = [max(1, together // sum(ranks))] * len(kinds)
    price_each = partial(_on, layout, accumulation)
    each, best = tuple(map(price_each, kinds, sizes)), None
    of_one_kind = len({kind.group.device.name for kind in kinds}) == 1
    for _ in range(1 if of_one_kind else SPLITS):
        rates = [part.samples / part.time.compute_seconds for part in each]
        rates = [kind.group.speed for kind in kinds] if of_one_kind else rates
        split = split_by_rate(together, list(zip(ranks, rates, strict=True)))
        if split is None:
            return None
        sizes = [max(size for _, size in own) for own in split]
        each = tuple(map(price_each, kinds, sizes))
        configuration = replace(
            layout,
            micro_batch_size=max(sizes),
            gradient_accumulation_steps=accumulation,
            global_batch_size=batch,
            micro_batches=write_sizes(chain(*split)),
        )
        shared = Shared(configuration=configuration, parts=each)
        if best is None or shared.step_seconds < (1 - WORTH_IT) * best.step_seconds:
            best = shared
    return best


def _on(layout: Configuration, accumulation: int, kind: Kind, samples: int) -> Part:
    """Return a group's part, priced with all nodes like it; what this machine ran says nothing of such a mixture."""
    priced = price(kind.request, resized(layout, samples, accumulation))
    return Part(group=kind.group, samples=samples, priced=priced, time=kind.request.experience.expected(priced.job))
