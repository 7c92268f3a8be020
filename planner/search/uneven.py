"""Plans for nodes that differ: unlike shares of a step, or the slower of each node for all if that is faster.

Shares are samples of a micro-batch by the speed of each rank, or blocks of the model by the speed of each stage of a
pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hardware_db.records import dataclass
from hardware_db.units import format_seconds
from planner.cluster.groups import level, name_group
from planner.cost.memo import memo_by_identity
from planner.errors import ContradictoryRequest
from planner.search.advice import Advice, faster
from planner.search.device_counts import on_devices
from planner.search.ranking import slower_threshold
from planner.search.request import Request
from planner.search.uneven_parts import Shared, kinds_of, plan_of_shared
from planner.search.uneven_shares import Evenly, fastest_shares
from planner.search.uneven_stages import fastest_stages
from planner.types.cluster import Cluster
from planner.types.plan import Plan

if TYPE_CHECKING:
    from planner.search.search import Recommendation


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
    """The best plan with as much on every rank; None where none fits."""
    shared: Shared | None
    """The best with unlike shares, of samples or of blocks; None where none fits, or none may have them."""
    plan: Plan | None
    """That of the unlike shares."""
    by_samples: Shared | None
    """The best whose ranks have samples by their speed."""
    by_stages: Shared | None
    """The best whose pipeline stages have blocks by their speed."""
    request: Request
    evenly: Evenly

    def without(self) -> tuple[LeftOut, ...]:
        """Search what the other nodes do without each group, with the global batch as `on_devices` has it."""
        return _left_out(self)

    @property
    def first(self) -> Plan | None:
        """The faster answer."""
        return (self.plan if self.is_first else self.even) or self.plan

    def advice(self) -> tuple[Advice, ...]:
        """Return the groups without which the others train faster, the gain of the best first."""
        if self.request.objective == "memory":
            return ()
        offered = filter(None, map(_advice_of, self.without()))
        return tuple(sorted(offered, key=lambda item: -item.speed))

    @property
    def is_first(self) -> bool:
        """True if unlike shares are the faster answer, a pipeline by more than what a simpler plan is preferred for."""
        if self.plan is None or self.even is None:
            return self.plan is not None
        return _goes_before(self.plan, self.even)

    def sentence(self) -> str:
        """Return why shares are alike or not."""
        if self.plan is None or self.shared is None:
            return "every GPU has as many samples: no plan of unlike shares fits"
        what = _WHAT[self.shared is self.by_stages]
        other = self.by_samples if self.shared is self.by_stages else self.by_stages
        others = "" if other is None else f", {_WHAT[other is self.by_stages]} {format_seconds(other.step_seconds)}"
        unlike = format_seconds(self.plan.time.step_seconds)
        if self.even is None:
            return f"GPUs have unlike shares, {what} ({unlike} a step{others}): as much on each fits nowhere"
        alike = format_seconds(self.even.time.step_seconds)
        if self.is_first:
            return f"GPUs have shares by their speed, {what}: {unlike} a step{others}, and {alike} with as much on each"
        return f"as much on every GPU takes {alike} a step, and shares by their speed, {what}, {unlike}{others}"


_WHAT = {True: "blocks of pipeline stages", False: "samples of micro-batches"}


def _goes_before(plan: Plan, other: Plan) -> bool:
    """Return whether a plan is faster, by more than it has to be if it is a pipeline and the other is simpler."""
    one, second = plan.configuration, other.configuration
    worth = 1 + slower_threshold(one, second) if one.layers_per_stage and second.pp == 1 else 1.0
    return plan.time.step_seconds * worth < other.time.step_seconds


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
    kinds = kinds_of(request)
    by_samples = fastest_shares(kinds, evenly, () if answer is None else answer.plans)
    by_stages = fastest_stages(request, kinds)
    shared, plan = _better(request, by_samples, by_stages)
    if problem is not None and plan is None:
        raise problem
    if answer is None:
        answer = replace(evenly(on_devices(request, request.cluster)), request=request, plans=(), closest=None)
    even = min(answer.plans, key=lambda other: other.time.step_seconds, default=None)
    uneven = Uneven(
        even=even,
        shared=shared,
        plan=plan,
        by_samples=by_samples,
        by_stages=by_stages,
        request=request,
        evenly=evenly,
    )
    if plan is None or not uneven.is_first:
        choice = "; ".join(filter(None, (answer.choice, uneven.sentence() if answer.plans else "")))
        return replace(answer, choice=choice, uneven=uneven)
    plans = (replace(plan, alternatives=_alternatives(plan, answer)), *answer.plans)[: request.top]
    others = "; all others have as many samples on each, and what is not shown is compared with the first of those"
    choice = uneven.sentence() + (others if answer.plans else "")
    return replace(answer, plans=plans, choice=choice, closest=None, remedies=(), uneven=uneven)


def _better(request: Request, by_samples: Shared | None, by_stages: Shared | None) -> tuple[Shared | None, Plan | None]:
    """Return the better of two ways to share, with its plan."""
    plans = [(shared, plan_of_shared(request, shared)) for shared in (by_samples, by_stages) if shared is not None]
    if len(plans) == 2:
        return plans[_goes_before(plans[1][1], plans[0][1])]
    return plans[0] if plans else (None, None)


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


@memo_by_identity
def _left_out(uneven: Uneven) -> tuple[LeftOut, ...]:
    first = uneven.first
    return () if first is None else tuple(_without(uneven.request, uneven.evenly, first))


def _advice_of(left_out: LeftOut) -> Advice | None:
    """Return the advice to leave a group of nodes out, if the others are faster alone."""
    plan, gain = left_out.plan, left_out.gain
    if plan is None or gain is None or gain > -_SLOWS:
        return None
    step = f"{format_seconds(plan.time.step_seconds)} a step of {plan.configuration.global_batch_size} samples"
    return Advice(
        change=f"leave out {name_group(left_out.group)}",
        flag=f"a --cluster file without {'that node' if left_out.group.nodes == 1 else 'those nodes'}",
        gain=faster(1 / (1 + gain), step),
        speed=1 / (1 + gain),
    )


_SLOWS = 0.01
"""Share of the speed from which on nodes that cost it are advised against; a choice: idle nodes are free besides."""


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
