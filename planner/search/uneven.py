"""Plans for nodes that differ: unlike shares of every micro-batch, or the slower of each for all if that is faster.

A step of data parallelism ends when its slowest rank has. Each group of alike nodes is priced as if all nodes were like
it, with its own share of the micro-batch and between the links that all have: the longest of these steps is the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from hardware_db.records import dataclass
from hardware_db.units import format_seconds
from planner import vocabulary as words
from planner.cluster.groups import all_like, level, name_group
from planner.cost.code_bases import code_base
from planner.cost.combinations import why_refused
from planner.cost.timing import throughput
from planner.errors import ContradictoryRequest
from planner.search.device_counts import on_devices
from planner.search.estimate import Priced, adapted_of, plan_of, price
from planner.search.request import Request
from planner.search.space import divisors
from planner.types.cluster import Cluster
from planner.types.job import cluster_section
from planner.types.plan import Configuration, Plan, StepTime, Throughput
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A group of alike nodes, and the question if all nodes were like it."""

    group: Cluster
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One group of alike nodes in a step."""

    group: Cluster
    samples: int
    """Of a micro-batch, on its fullest rank."""
    priced: Priced
    """As if all nodes were like it."""
    time: StepTime

    @property
    def pressure(self) -> float:
        """The share of a device's memory that is needed."""
        return self.priced.judgement.pressure


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A configuration with unlike shares, and what each group makes of it."""

    configuration: Configuration
    parts: tuple[Part, ...]

    @property
    def slowest(self) -> Part:
        """The group that the others wait for."""
        return max(self.parts, key=lambda part: part.time.step_seconds)

    def fits(self, request: Request) -> bool:
        """Return whether every group has the memory, with every margin unless the request goes to the limit."""
        judgements = [part.priced.judgement for part in self.parts]
        if request.to_the_limit:
            return all(judgement.verdict != "does_not_fit" for judgement in judgements)
        return all(judgement.keeps_margins for judgement in judgements)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """The fastest plan without one group of the nodes."""

    group: Cluster
    plan: Plan | None
    """None where nothing fits without it."""
    gain: float | None
    """By what share all nodes train more samples per second than those without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uneven:
    """Training over nodes that differ: with unlike shares, as the slower of each, and without the odd ones."""

    even: Plan | None
    """The best plan with as many samples on every rank; None where none fits."""
    shared: Shared | None
    """The best with unlike shares; None where none fits, or none may have them."""
    plan: Plan | None
    """That of the unlike shares."""
    request: Request
    evenly: Evenly

    def without(self) -> tuple[LeftOut, ...]:
        """Search what the other nodes do without each group, with the global batch as `on_devices` has it."""
        first = (self.plan if self.is_first else self.even) or self.plan
        return () if first is None else tuple(_without(self.request, self.evenly, first))

    @property
    def is_first(self) -> bool:
        """True if unlike shares are the faster answer."""
        if self.plan is None or self.even is None:
            return self.plan is not None
        return self.plan.time.step_seconds < self.even.time.step_seconds

    def sentence(self) -> str:
        """Return why shares are alike or not."""
        if self.plan is None:
            return "every GPU has as many samples: no plan of unlike shares fits"
        unlike = f"{format_seconds(self.plan.time.step_seconds)} a step"
        if self.even is None:
            return f"GPUs have unlike shares ({unlike}): as many samples on each fit nowhere"
        alike = format_seconds(self.even.time.step_seconds)
        if self.is_first:
            return f"GPUs have shares by their speed: {unlike}, and {alike} with as many samples on each"
        return f"as many samples on every GPU take {alike} a step, and shares by their speed {unlike}"


def recommend_for_groups(request: Request, evenly: Evenly) -> Recommendation:
    """Rank plans for a cluster whose nodes differ; the first has unlike shares where these are faster.

    Raises:
        ContradictoryRequest: the global batch cannot be split over the GPUs in any way.
    """
    answer, problem = None, None
    try:
        answer = evenly(request)
    except ContradictoryRequest as refusal:
        problem = refusal
    shared = _fastest(request, evenly, () if answer is None else answer.plans)
    plan = None if shared is None else _plan(request, shared)
    if problem is not None and plan is None:
        raise problem
    if answer is None:
        answer = replace(evenly(on_devices(request, request.cluster)), request=request, plans=(), closest=None)
    even = min(answer.plans, key=lambda other: other.time.step_seconds, default=None)
    uneven = Uneven(even=even, shared=shared, plan=plan, request=request, evenly=evenly)
    if plan is None or not uneven.is_first:
        choice = "; ".join(filter(None, (answer.choice, uneven.sentence() if answer.plans else "")))
        return replace(answer, choice=choice, uneven=uneven)
    plans = (replace(plan, alternatives=_alternatives(plan, answer)), *answer.plans)[: request.top]
    others = "; all others have as many samples on each, and what is not shown is compared with the first of those"
    choice = uneven.sentence() + (others if answer.plans else "")
    return replace(answer, plans=plans, choice=choice, closest=None, remedies=(), uneven=uneven)


def _alternatives(plan: Plan, answer: Recommendation) -> tuple[dict[str, str], ...]:
    """Return what the plan of unlike shares was chosen over: every plan with as many samples on each GPU."""
    reason = "as many samples on every GPU: {:.2f}x the step time"
    return tuple(
        {
            "strategy": other.configuration.strategy,
            "reason": reason.format(other.time.step_seconds / plan.time.step_seconds),
        }
        for other in answer.plans
    )


def _fastest(request: Request, evenly: Evenly, plans: Sequence[Plan]) -> Shared | None:
    """Return the configuration of unlike shares with the shortest step; None where none fits or may be."""
    workload = request.workload
    may = code_base(workload.code).runs_here and not workload.generates and request.micro_batch is None
    if request.objective == "memory" or not may:
        return None
    cluster = request.cluster
    # What is priced is remembered by the cluster it is on, so that there is one of each kind.
    kinds = [Kind(group=each, request=replace(request, cluster=all_like(cluster, each))) for each in cluster.groups]
    every = (shared for layout in _layouts(kinds, evenly, plans) for shared in _fitting(kinds, layout))
    return min(every, key=lambda shared: shared.slowest.time.step_seconds, default=None)


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
    for chosen in (_resized(plan.configuration, 1, 1) for plan in every):
        layout = replace(chosen, backend="native") if chosen.zero_stage else chosen
        splits_groups = any(kind.group.gpus % layout.sharing for kind in kinds)
        refused = layout.pp * layout.ep > 1 or why_refused(layout, adapted_of(request.workload))
        if layout.world_size == request.cluster.gpus and not splits_groups and not refused:
            layouts[layout] = None
    return tuple(layouts)


def _resized(layout: Configuration, micro_batch: int, accumulation: int) -> Configuration:
    ranks = layout.dims.data_parallel
    return replace(
        layout,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        global_batch_size=micro_batch * accumulation * ranks,
        micro_batches="",
    )


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
        if best is None or shared.slowest.time.step_seconds < (1 - WORTH_IT) * best.slowest.time.step_seconds:
            best = shared
    return best


def _on(layout: Configuration, accumulation: int, kind: Kind, samples: int) -> Part:
    """Return a group's part, priced with all nodes like it; what this machine ran says nothing of such a mixture."""
    priced = price(kind.request, _resized(layout, samples, accumulation))
    return Part(group=kind.group, samples=samples, priced=priced, time=kind.request.experience.expected(priced.job))


def _plan(request: Request, shared: Shared) -> Plan:
    """Return the plan: the time of the slowest group and the memory of the one that has least room."""
    slow, tight = shared.slowest, max(shared.parts, key=lambda part: part.pressure)
    base = plan_of(slow.priced, slow.time)
    is_tight = any(part.priced.judgement.verdict == "tight" for part in shared.parts)
    verdict: words.Verdict = "tight" if is_tight else "fits"
    each = "; ".join(
        f"{part.samples} on each GPU of {name_group(part.group)} ({format_seconds(part.time.step_seconds)} a step)"
        for part in shared.parts
    )
    alike = len({group.gpus_per_node for group in request.cluster.groups}) == 1
    by_hand = "" if alike else "nodes have unlike numbers of GPUs, which mpirun and srun start and dsplan run does not"
    notes = (f"samples of a micro-batch: {each}", by_hand, *base.notes)
    return replace(
        base,
        configuration=shared.configuration,
        cluster={**cluster_section(request.cluster), "capacity_bytes": tight.priced.job.cluster.capacity_bytes},
        memory=tight.priced.memory,
        throughput=_throughput(request, shared, base.time),
        verdict=verdict,
        notes=tuple(dict.fromkeys(note for note in notes if note)),
    )


def _throughput(request: Request, shared: Shared, time: StepTime) -> Throughput:
    """Return the rates of all GPUs together; `mfu` is against the sum of their peaks."""
    part = shared.slowest
    alike = throughput(part.priced.job, time)
    share = request.workload.global_batch_size / part.priced.job.configuration.global_batch_size
    peak = None if alike.mfu is None else alike.tflops_per_gpu / alike.mfu
    rates = replace(
        alike,
        tokens_per_second_per_gpu=alike.tokens_per_second_per_gpu * share,
        samples_per_second=alike.samples_per_second * share,
        tflops_per_gpu=alike.tflops_per_gpu * share,
        mfu=None,
    )
    peaks = [_peak_tflops(other, time) for other in shared.parts]
    if peak is None or None in peaks:
        return rates
    total = sum((own or 0.0) * other.group.gpus for own, other in zip(peaks, shared.parts, strict=True))
    return replace(rates, mfu=rates.tflops_per_gpu * request.cluster.gpus / total)


def _peak_tflops(part: Part, time: StepTime) -> float | None:
    rates = throughput(part.priced.job, time)
    return None if not rates.mfu else rates.tflops_per_gpu / rates.mfu


def _without(request: Request, evenly: Evenly, first: Plan) -> Iterator[LeftOut]:
    groups = request.cluster.groups
    for group in groups:
        others = [other for other in groups if other is not group]
        cluster = replace(level(others), reliability=request.cluster.reliability)
        plan = _first_without(on_devices(request, cluster), evenly)
        gain = None if plan is None else first.throughput.samples_per_second / plan.throughput.samples_per_second - 1
        yield LeftOut(group=group, plan=plan, gain=gain)


def _first_without(request: Request, evenly: Evenly) -> Plan | None:
    try:
        if request.cluster.groups:
            plans: Sequence[Plan] = recommend_for_groups(request, evenly).plans
        else:
            plans = evenly(request).plans
    except ContradictoryRequest:
        return None
    return next(iter(plans), None)
