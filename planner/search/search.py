"""Search the best plan of every strategy and rank them; give a reason for every strategy without a plan.

The search does not know how memory and time are computed; `planner.search.evaluate` finds the best of each strategy.
The micro-batch is cut from the global batch, so that is always the one asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.cost.timing import step_time
from planner.errors import ContradictoryRequest
from planner.search.device_counts import OnDevices, device_counts, on_other_device_counts
from planner.search.estimate import Priced, is_last_resort, plan_of, waits_mostly
from planner.search.evaluate import Candidate, any_that_fits, best, bound, closest, preferred
from planner.search.ranking import (
    ONE_STRATEGY,
    Rejection,
    Timed,
    apart_from_doubles,
    compare,
    group_name,
    is_safe,
    order,
    ran_out,
    rank,
    rejections,
    strategy_name,
    too_late,
    why_first,
    widest_threshold,
)
from planner.search.request import Request
from planner.search.space import enumerate_candidates
from planner.types.plan import Plan

if TYPE_CHECKING:
    from planner.search.advice import Advice
    from planner.search.no_plan import NoPlan, Remedy
    from planner.search.uneven import Uneven


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Ranked plans, best first, and in `choice` why the first is; without one, the closest miss and what would help.

    Beside plans that offload, `remedies` name what trains on the devices alone.

    With a deadline the plans are those that end in time, the closest miss may be one that fits and ends too late, and
    `on_devices` says on how many devices the training would end in time. `front` is there where it was asked for,
    `uneven` where nodes differ.
    """

    request: Request
    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    choice: str = ""
    closest: Plan | None = None
    remedies: tuple[Remedy, ...] = ()
    on_devices: tuple[OnDevices, ...] = ()
    front: tuple[Plan, ...] = ()
    uneven: Uneven | None = None

    def no_plan(self) -> NoPlan:
        """Compose what is said of an answer without plans, or whose plans the caller cannot take."""
        from planner.search.no_plan import compose_no_plan  # takes milliseconds, and most answers have plans

        return compose_no_plan(self.request, self.closest or next(iter(self.plans), None), self.remedies)

    def advice(self) -> tuple[Advice, ...]:
        """Try what would help more than another plan; each trial is a small search.

        Nodes without which the others are faster come first. Other trials give every GPU as many samples, so that none
        is compared with a plan of unlike shares.
        """
        if not self.plans:
            return ()
        left_out = () if self.uneven is None else self.uneven.advice()
        if self.plans[0].configuration.has_shares:
            return left_out
        from planner.search.advice import advise  # after the answer, so that it does not wait

        return (*left_out, *advise(self.request, self.plans[0], _first))


def recommend(request: Request, *, with_front: bool = False) -> Recommendation:
    """Rank the best plan of every strategy that fits; `with_front` adds the Pareto front.

    Where nodes differ, ranks have shares of the batch, or stages of a pipeline blocks, by their speed if that is faster
    (`planner.search.uneven`).

    Raises:
        ContradictoryRequest: the global batch cannot be split over the GPUs in any way.
    """
    evenly = partial(_recommend_evenly, with_front=with_front)
    if not request.cluster.groups:
        return evenly(request)
    from planner.search.uneven import recommend_for_groups  # few clusters need it

    return recommend_for_groups(request, evenly)


def _recommend_evenly(request: Request, *, with_front: bool) -> Recommendation:
    """Rank plans that give every rank as many samples."""
    limit = request.budget.step_limit(request.workload)
    groups = group_candidates(request)
    chosen, late = [], []
    choose = _choice(request)
    for group in groups.values():
        item = choose(group, request.objective, limit)
        if item is not None:
            chosen.append(item)
        elif limit < math.inf and (too_slow := best(group, "throughput")) is not None:
            late.append(too_slow)
    every, late = rank(request, chosen), rank(request, late)
    missing = _misses(groups.values(), [*every, *late])
    ranked, doubles = apart_from_doubles(every)
    safe = _safe_one(request, ranked, groups, limit)
    if safe is not None:
        ranked = [ranked[0], safe, *(item for item in ranked[1:] if item is not safe)]
    others = (*doubles, *too_late(request, late), *_undivided(groups), *ran_out(request))
    rejected = (*rejections(request, ranked, missing, doubles), *others)
    if not ranked and not late and any(priced.judgement.verdict == "tight" for priced in missing):
        return _recommend_evenly(replace(request, to_the_limit=True), with_front=with_front)
    if not ranked:
        return _late(request, late, rejected) if late else _nothing(request, missing, rejected)
    plans = _with_alternatives(request, ranked, rejected)
    return Recommendation(
        request=request,
        plans=plans,
        remedies=_adapters(request, plans[0]) + (_with_margins(request) if request.to_the_limit else ()),
        rejected=rejected,
        choice="; ".join(filter(None, (why_first(request, ranked, safe), _why_uneven(request)))),
        on_devices=on_other_device_counts(request, _first) if limit < math.inf else (),
        front=_front(request, groups) if with_front else (),
    )


def first_plan(request: Request, within: float = math.inf) -> Plan | None:
    """Return the first plan of `recommend` alone, without reasons and a deadline.

    None where nothing fits, or no plan that fits takes at most `within` seconds a step, which is known sooner.

    Raises:
        ContradictoryRequest: as `recommend`.
    """
    groups = list(group_candidates(request).values())
    if within < math.inf and all(best(group, "throughput", within) is None for group in groups):
        return None
    ranked = rank(request, _near_the_fastest(request, groups))
    return ranked[0].plan if ranked else None


def _near_the_fastest(request: Request, groups: Sequence[Sequence[Candidate]]) -> list[Timed]:
    """Return the best of every group; where time counts, only of those whose best may be first."""
    choose = _choice(request)
    if request.objective != "throughput":
        every = (choose(group, request.objective, math.inf) for group in groups)
        return [item for item in every if item is not None]
    chosen: list[Timed] = []
    fastest, widest = math.inf, widest_threshold(request)
    for least, group in sorted(((bound(group), group) for group in groups), key=lambda pair: pair[0]):
        limit = fastest * (1 + widest) * (1 + ONE_STRATEGY)  # the one with room that goes before a group's best
        if group_name(group[0].layout) in words.REPLICAS:
            limit = math.inf  # a small model's goes before shards however long its optimizer takes
        item = choose(group, request.objective, limit) if least <= limit else None
        if item is not None:
            chosen.append(item)
            if not waits_mostly(item.priced.job, item.time):  # all others go before such a plan, however slow
                fastest = min(fastest, (item.passed_over or item).time.step_seconds)
    return chosen


def _safe_one(
    request: Request, ranked: Sequence[Timed], groups: Mapping[str, Sequence[Candidate]], limit: float
) -> Timed | None:
    """Return the best safe plan where the first is none: on the devices alone if any is."""
    if not ranked or is_safe(ranked[0]) or request.objective == "memory":
        return None
    own = groups[group_name(ranked[0].configuration)]
    roomy = best([candidate.with_room() for candidate in own], request.objective, limit)
    safe = [item for item in (roomy, *ranked[1:]) if item is not None and is_safe(item)]
    return min(
        safe,
        key=lambda item: (item.configuration.offload != "none", *order(item, request.objective)),
        default=None,
    )


def _choice(request: Request) -> Callable[[Sequence[Candidate], words.Objective, float], Timed | None]:
    return preferred if request.simplest_first and request.objective != "cost" else best


def _adapters(request: Request, instead: Plan | None) -> tuple[Remedy, ...]:
    """Adapters beside a plan that does not keep the training of all weights on the devices, or where there is none."""
    if instead is not None and instead.configuration.offload == "none" and not is_last_resort(instead):
        return ()
    from planner.search.no_plan import adapter_remedies

    return adapter_remedies(request, _first, instead)


def _with_margins(request: Request) -> tuple[Remedy, ...]:
    from planner.search.no_plan import remedies

    return remedies(replace(request, to_the_limit=False), can_fit)


def _front(request: Request, groups: Mapping[str, Sequence[Candidate]]) -> tuple[Plan, ...]:
    from planner.search.pareto import pareto_front

    return tuple(item.plan for item in pareto_front(request, itertools.chain.from_iterable(groups.values())))


def can_fit(request: Request) -> Priced | None:
    """Return the first plan that fits, in the order of `enumerate_candidates`, or None if there is none."""
    every = (Candidate(request, layout) for layout in enumerate_candidates(request) if layout.virtual_stages == 1)
    return any_that_fits(every)


def describe(plan: Plan) -> str:
    """Return a plan's strategy with its degrees and offload, as tables name it."""
    return group_name(plan.configuration)


def group_candidates(request: Request) -> dict[str, list[Candidate]]:
    """Every candidate, those that compete with each other together; the best of each group is shown."""
    groups: dict[str, list[Candidate]] = {}
    for option in device_counts(request):
        for layout in enumerate_candidates(option):
            groups.setdefault(group_name(layout), []).append(Candidate(option, layout))
    return groups


def _misses(groups: Iterable[Sequence[Candidate]], ranked: Sequence[Timed]) -> list[Priced]:
    """Return the closest miss of every strategy of which nothing fits, with or without offload, on all the devices."""
    fitting = {strategy_name(item.configuration) for item in ranked}
    strategies: dict[str, list[Candidate]] = {}
    for group in groups:
        name = strategy_name(group[0].layout)
        if name not in fitting:
            on_all = [candidate for candidate in group if candidate.request is group[0].request]
            strategies.setdefault(name, []).extend(on_all)
    return [miss for group in strategies.values() if (miss := closest(group)) is not None]


def _undivided(groups: Mapping[str, Sequence[Candidate]]) -> Iterator[Rejection]:
    """Yield the strategies whose ranks the batch cannot be split over."""
    for name, group in groups.items():
        if group[0].layout.offload == "none" and not any(candidate.micros for candidate in group):
            ranks, batch = group[0].layout.data_parallel, group[0].request.workload.global_batch_size
            reason = f"global batch {batch} cannot be split over {ranks} data-parallel ranks"
            yield Rejection(strategy=name, reason=reason)


def _why_uneven(request: Request) -> str | None:
    """Return which batches every GPU could have its own samples of, where the one that was asked for is none."""
    batch, gpus = request.workload.global_batch_size, request.cluster.gpus
    if batch % gpus == 0 or request.degrees is not None or request.allow_unrunnable:
        return None
    below = batch - batch % gpus
    nearest = f"{below} or {below + gpus}" if below else str(gpus)
    return f"global batch {batch} cannot be split evenly over {gpus} GPUs; use {nearest} for plans that split no model"


def _first(request: Request, within: float = math.inf) -> Plan | None:
    try:
        return first_plan(request, within)
    except ContradictoryRequest:  # the batch cannot be split over so many devices
        return None


def _late(request: Request, late: Sequence[Timed], rejected: tuple[Rejection, ...]) -> Recommendation:
    """Plans fit, and none ends in time: the best of them, and the numbers of devices on which one would."""
    from planner.search.no_plan import in_time_remedies

    on_devices = on_other_device_counts(request, _first)
    return Recommendation(
        request=request,
        plans=(),
        rejected=rejected,
        closest=min(late, key=lambda item: item.time.step_seconds).plan,
        remedies=in_time_remedies(request, on_devices),
        on_devices=on_devices,
    )


def _nothing(request: Request, missing: Sequence[Priced], rejected: tuple[Rejection, ...]) -> Recommendation:
    if not missing:
        batch, gpus = request.workload.global_batch_size, request.cluster.gpus
        shard = request.shard
        if shard is not None and gpus % shard:
            below = next((size for size in range(min(shard, gpus), 1, -1) if gpus % size == 0), None)
            remedy = f"use {below}" if below else "leave it out"
            raise ContradictoryRequest(f"--shard {shard} does not divide {gpus} GPU{'s' * (gpus > 1)}; {remedy}")
        raise ContradictoryRequest(_why_uneven(request) or f"global batch {batch} cannot be split over {gpus} GPUs")
    from planner.search.no_plan import remedies

    nearest = min(missing, key=lambda priced: priced.judgement.pressure)
    return Recommendation(
        request=request,
        plans=(),
        rejected=rejected,
        closest=plan_of(nearest, step_time(nearest.job)),
        remedies=(*_adapters(request, None), *remedies(request, can_fit)),
    )


def _with_alternatives(request: Request, ranked: Sequence[Timed], rejected: Sequence[Rejection]) -> tuple[Plan, ...]:
    """Return the plans that are shown, the first of them knowing what it was chosen over."""
    shown = ranked[: request.top]
    others = [
        {"strategy": group_name(item.configuration), "reason": compare(request, item, ranked[0])} for item in shown[1:]
    ]
    others += [{"strategy": item.strategy, "reason": item.reason} for item in rejected]
    return (replace(shown[0].plan, alternatives=tuple(others)), *(item.plan for item in shown[1:]))
