"""Rank plans that fit, and say why the others lost.

Plans whose predicted times are closer than such predictions err against each other are equally fast as far as can be
told. Of those that cannot be told from the fastest one with room in memory goes first, and of these the simplest
(`preference`); then the same again among the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from hardware_db.records import dataclass
from hardware_db.units import DAY_SECONDS, format_bytes, format_seconds
from planner import vocabulary as words
from planner.calibration.spread import AGAIN, NINE_OF_TEN
from planner.cluster.budget import bill_of
from planner.cost.combinations import why_refused
from planner.cost.memory.overhead import beyond_need
from planner.cost.timing import step_time
from planner.cost.verdict import device_limit, limited_by
from planner.search.estimate import Priced, adapted_of, plan_of, waits_mostly
from planner.search.request import Request
from planner.search.space import why_inapplicable
from planner.types.plan import Configuration, Plan, StepTime

# Room in memory and simplicity of plans, and the difference from which on two predictions count as different.


ONE_STRATEGY = 0.15
"""How far the ratio of two predicted step times is from the measured one, at the 90th percentile, where two plans of
one strategy differ in micro-batch or recomputation: 905 published pairs in 88 groups (`scripts/fit/ratio_spread.py`).
It counts where one of the two has room in memory and the other has not."""
SPLIT_OR_WHOLE = 0.125
"""How far the ratio of two predicted step times is from the measured one, at the 90th percentile, where one plan splits
layers and the other does not: 943 published pairs in 46 groups, each publication left out of the fit
(`scripts/fit/ratio_spread.py`). Most of what is wrong with the one prediction is wrong with the other too."""
NEVER_COMPARED = 0.15
"""The same where nothing published compares such pairs: a replica with shards, torch with DeepSpeed, a device that
keeps its states with one that offloads them. Then nothing is known to cancel, and two predictions, each off by 11 % at
the 90th percentile (docs/reference/accuracy.md), are off against each other by the root of two of it."""

WIDEST = max(NEVER_COMPARED, SPLIT_OR_WHOLE, ONE_STRATEGY, math.exp(NINE_OF_TEN * math.sqrt(2) * AGAIN) - 1)
"""The largest of all such shares: `worse_threshold` gives none above it."""


class Named(Protocol):
    """A layout or a configuration, as far as names and simplicity go."""

    @property
    def strategy(self) -> words.Strategy:
        """Strategy by its name on the command line."""

    @property
    def offload(self) -> words.Offload:
        """Memory that states are moved to."""

    @property
    def tp(self) -> int:
        """Ranks that split layers."""

    @property
    def pp(self) -> int:
        """Stages of the pipeline."""

    @property
    def cp(self) -> int:
        """Ranks that split sequences."""

    @property
    def ep(self) -> int:
        """Ranks that experts are spread over."""


def simplicity(plan: Named) -> tuple[int, ...]:
    """Return the simplicity of a plan, smaller is simpler.

    Whole layers go before split ones, all on the device before offload, a replica before torch's shards, and those
    before ZeRO, which asks for one more library.
    """
    sharded = 2 if plan.strategy in words.ZERO_STAGES else int(plan.strategy in words.FSDP_STRATEGIES)
    return plan.tp * plan.pp * plan.cp * plan.ep > 1, words.OFFLOADS.index(plan.offload), sharded


def slower_threshold(one: Named, other: Named) -> float:
    """Return the share of a step time from which on one plan counts as slower than another."""
    if simplicity(one) == simplicity(other):
        return ONE_STRATEGY if one.strategy == other.strategy else NEVER_COMPARED
    only_split = simplicity(one)[1:] == simplicity(other)[1:]
    return SPLIT_OR_WHOLE if only_split else NEVER_COMPARED


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A strategy that is not among the plans; `plan` is its best one where it fits, else its closest miss."""

    strategy: str
    reason: str
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A configuration that fits, with its step time.

    `passed_over` is a better one of the same group that has no room in memory, which this one has.
    """

    priced: Priced
    time: StepTime
    passed_over: Timed | None = None

    @property
    def configuration(self) -> Configuration:
        """The configuration that was timed."""
        return self.priced.job.configuration

    @property
    def plan(self) -> Plan:
        """The whole plan, with notes and provenance."""
        return plan_of(self.priced, self.time)

    @property
    def was_run(self) -> bool:
        """True if its time is what this machine measured."""
        return self.time.predicted_step_seconds is not None

    @property
    def has_room(self) -> bool:
        """True if it fits as real runs went beyond what is predicted; what ran here has shown that it fits."""
        return self.was_run or self.priced.judgement.verdict == "fits"


def preference(item: Timed) -> tuple[int, ...]:
    """Return what goes before where times cannot be told apart, smaller first.

    Room in memory comes first, unless an offload makes it, then simplicity. Plans that are equal in both are ranked by
    their times alone.
    """
    offloads = item.configuration.offload != "none"
    return (not item.has_room) + offloads, *simplicity(item.configuration)


def worth(item: Timed, objective: words.Objective) -> float:
    """Return what the objective makes smallest: seconds of a step, GPU-seconds of a step, or bytes of device memory."""
    if objective == "memory":
        return float(item.priced.memory.device_used_bytes)
    return item.time.step_seconds * (item.configuration.world_size if objective == "cost" else 1)


def order(item: Timed, objective: words.Objective) -> tuple[float, ...]:
    """Return the key of the order by worth; then by memory and time; then by the words and numbers of the plan.

    So equal plans always stand in the same order.
    """
    chosen, memory = item.configuration, item.priced.memory.device_used_bytes
    return (
        worth(item, objective),
        memory,
        item.time.step_seconds,
        *simplicity(chosen),
        words.STRATEGIES.index(chosen.strategy),
        *(chosen.world_size, chosen.tp, chosen.pp, chosen.cp, chosen.ep, chosen.virtual_stages),
        chosen.micro_batch_size,
        words.CHECKPOINTINGS.index(chosen.activation_checkpointing),
        not chosen.sync_each_micro_batch,
    )


def rank(request: Request, items: Sequence[Timed]) -> list[Timed]:
    """Best first, one of each group."""
    # What was passed over inside its group is what others are compared with as well: thresholds must not add up.
    items = [*items, *(item.passed_over for item in items if item.passed_over is not None)]
    return _in_order(request, items)


def _in_order(request: Request, items: Sequence[Timed]) -> list[Timed]:
    left = sorted(items, key=lambda item: order(item, request.objective))
    resorts = [item for item in left if waits_mostly(item.priced.job, item.time)]
    if resorts and len(resorts) < len(left):
        # Last resorts come after all that computes, whatever the objective.
        others = [item for item in items if item not in resorts]
        return [*_in_order(request, others), *_in_order(request, resorts)]
    if not request.simplest_first:
        return left
    ranked = []
    while left:
        first = _preferred(left, request.objective)
        left = _without_group(left, first)
        ranked.append(first)
    return ranked


def _without_group(items: Sequence[Timed], first: Timed) -> list[Timed]:
    name = group_name(first.configuration)
    return [item for item in items if group_name(item.configuration) != name]


def _preferred(items: Sequence[Timed], objective: words.Objective) -> Timed:
    """Return the preferred one of those that are not clearly worse than the first, which is the best.

    It may also be what is preferred as much and no worse: of some pairs less is known than of others.
    """
    alike = [item for item in items if not clearly_worse(item, items[0], objective)]
    level = min(map(preference, alike))
    return next(item for item in items if preference(item) <= level)


def clearly_worse(item: Timed, best: Timed, objective: words.Objective) -> bool:
    """Return whether a plan is worse than the best one by more than the prediction of their ratio may be wrong."""
    return worth(item, objective) / worth(best, objective) > 1 + worse_threshold(item, best, objective)


def worse_threshold(item: Timed, best: Timed, objective: words.Objective) -> float:
    """Return by how much a plan must be worse than another to count as worse.

    Memory is predicted well enough to be compared as it is, and who asks for cost gets the cheapest; two plans that
    this machine has run differ by what a run does when it is made again.
    """
    if objective in ("memory", "cost") or preference(item) == preference(best):
        return 0.0
    if item.was_run and best.was_run:
        return math.exp(NINE_OF_TEN * math.sqrt(2) * AGAIN) - 1
    return slower_threshold(item.configuration, best.configuration)


def group_name(plan: Named) -> str:
    """Plans of one group compete with each other; the best of each is shown."""
    name = strategy_name(plan)
    return name if plan.offload == "none" else f"{name} + offload {plan.offload}"


def strategy_name(plan: Named) -> str:
    """Return the strategy, and whether layers, sequences or experts are split as well."""
    splits = {"tp/pp": plan.tp * plan.pp, "cp": plan.cp, "ep": plan.ep}
    split = "/".join(name for name, degree in splits.items() if degree > 1)
    return f"{plan.strategy} + {split}" if split else plan.strategy


def rejections(request: Request, ranked: Sequence[Timed], missing: Sequence[Priced]) -> tuple[Rejection, ...]:
    """Return why each strategy beyond the shown ones is not among them: slower, too large, or senseless here."""
    rejected = []
    for item in ranked[request.top :]:
        reason = compare(request, item, ranked[0])
        rejected.append(Rejection(strategy=group_name(item.configuration), reason=reason, plan=item.plan))
    for priced in missing:
        name, plan = strategy_name(priced.job.configuration), plan_of(priced, step_time(priced.job))
        rejected.append(Rejection(strategy=name, reason=_why_missing(priced), plan=plan))
    named = {item.strategy for item in rejected} | {strategy_name(item.configuration) for item in ranked}
    for strategy in words.STRATEGIES:
        senseless = why_inapplicable(request, strategy)
        if senseless and strategy not in named:
            rejected.append(Rejection(strategy=strategy, reason=senseless))
    return tuple(rejected)


def too_late(request: Request, late: Sequence[Timed]) -> tuple[Rejection, ...]:
    """Return the strategies that fit and do not end in time, at their fastest."""
    rejected = []
    for item in late:
        days = bill_of(item.configuration, item.time.step_seconds, None, request.budget).days or 0.0
        reason = f"fits, takes {format_seconds(days * DAY_SECONDS)}"
        rejected.append(Rejection(strategy=group_name(item.configuration), reason=reason, plan=item.plan))
    return tuple(rejected)


def ran_out(request: Request) -> tuple[Rejection, ...]:
    """Return the plans that ran out of memory and so are not proposed."""
    return tuple(
        Rejection(strategy=group_name(record.configuration), reason=record.sentence())
        for record in request.experience.oom_records
        if record.counts_on(request.cluster)
    )


def compare(request: Request, item: Timed, first: Timed) -> str:
    """Return how a plan that fits compares with the first one, in what the objective counts."""
    blocked = why_refused(item.configuration, adapted_of(request.workload))
    aside = f"; {blocked}" if blocked else ""
    ratio = worth(item, request.objective) / worth(first, request.objective)
    if request.objective == "memory":
        return f"fits, {ratio:.2f}x the memory{aside}"
    if ratio < 0.995 and not blocked:
        aside = f"; not told apart from {group_name(first.configuration)}, which is simpler"
    if request.objective == "cost":
        gpus = item.configuration.world_size
        return f"fits, {ratio:.2f}x the GPU-seconds, on {gpus} {'GPU' if gpus == 1 else 'GPUs'}{aside}"
    return f"fits, {ratio:.2f}x the step time, limited by {limited_by(item.time)}{aside}"


def why_first(request: Request, ranked: Sequence[Timed]) -> str:
    """Return why the first plan is first, in one line."""
    first, objective = ranked[0], request.objective
    best = min(ranked, key=lambda item: order(item, objective))
    reason = f"{group_name(first.configuration)} {_IS_BEST[objective]}"
    if best is not first:
        width = worse_threshold(first, best, objective)
        name, other = group_name(first.configuration), group_name(best.configuration)
        why = f"{name} is simpler than {other}" if best.has_room else f"{name} has more room in memory than {other}"
        reason = (
            f"{why}, which is predicted {ahead(first, best, objective)}; two such plans are told apart from"
            f" {width:.0%} on"
        )
    if first.passed_over is not None:
        reason += f"; {_without_room(first, first.passed_over, objective)}"
    if not first.has_room:
        reason += f"; it {_tight(first)}"
    return reason


def _tight(item: Timed) -> str:
    """Return that a plan fits without room: `needs 77.0 GiB of 79.1 GiB, where one run in twenty takes 21% more`."""
    job, need = item.priced.job, item.priced.memory.device_needed_bytes
    limit = device_limit(job.workload, job.cluster)
    more = f"{beyond_need(job):.0%} more"
    return f"needs {format_bytes(need)} of {format_bytes(limit)}, where one run in twenty takes {more}"


def _without_room(first: Timed, fuller: Timed, objective: words.Objective) -> str:
    """Return the plan of the first one's group that would be better and has no room."""
    chosen = fuller.configuration
    recompute = "no" if chosen.activation_checkpointing == "none" else chosen.activation_checkpointing
    return (
        f"with micro-batch {chosen.micro_batch_size} and {recompute} recomputation it is predicted"
        f" {ahead(first, fuller, objective)} and {_tight(fuller)}"
    )


def ahead(first: Timed, other: Timed, objective: words.Objective) -> str:
    """Return how much better another plan is predicted to be: `6% faster`, `4.0x as fast`, `30% cheaper`."""
    ratio = worth(first, objective) / worth(other, objective)
    if objective == "throughput" and ratio >= 2:
        return f"{ratio:.1f}x as fast"
    share = ratio - 1 if objective == "throughput" else 1 - 1 / ratio
    return f"{share:.0%} {_BETTER[objective]}" if share >= 0.005 else f"less than 1% {_BETTER[objective]}"


_IS_BEST = {"throughput": "is predicted fastest", "memory": "needs least memory", "cost": "costs least per token"}
_BETTER = {"throughput": "faster", "memory": "smaller", "cost": "cheaper"}


def _why_missing(priced: Priced) -> str:
    """Return why a strategy's closest configuration does not fit."""
    configuration = priced.job.configuration
    savers = []
    if configuration.activation_checkpointing != "none":
        savers.append(f"{configuration.activation_checkpointing} checkpointing")
    if configuration.offload != "none":
        savers.append(f"offload {configuration.offload}")
    with_what = f" with {' and '.join(savers)}" if savers else ""
    return f"{priced.judgement.reason} even at micro-batch {configuration.micro_batch_size}{with_what}"
