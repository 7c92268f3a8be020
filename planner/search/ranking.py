"""Rank plans that fit, and say why the others lost.

Plans whose predicted times are closer than such predictions err against each other are equally fast as far as can be
told. Of those that cannot be told from the fastest one with room in memory goes first, and of these the simplest
(`preference`); the rest follow by what the objective counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from hardware_db.records import dataclass
from hardware_db.units import DAY_SECONDS, format_bytes, format_seconds
from planner import vocabulary as words
from planner.calibration.spread import AGAIN, NINE_OF_TEN, OUTSIDE_OF_CPUS, spread_of
from planner.cluster.budget import bill_of
from planner.cost.code_bases import code_base
from planner.cost.combinations import why_refused
from planner.cost.intervals import memory_headroom, widest_half_width
from planner.cost.timing import step_time
from planner.cost.verdict import TIGHT_ABOVE, device_limit, host_limit, limited_by
from planner.search.estimate import Priced, adapted_of, plan_of, waits_mostly
from planner.search.request import Request
from planner.search.space import BYTES_PER_PARAMETER, why_inapplicable
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

TWO_RUNS = math.exp(NINE_OF_TEN * math.sqrt(2) * AGAIN) - 1
"""By how much two runs of one plan differ at the 90th percentile."""


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

    @property
    def virtual_stages(self) -> int:
        """Stages of the pipeline on each of its ranks."""


def simplicity(plan: Named) -> tuple[int, ...]:
    """Return the simplicity of a plan, smaller is simpler.

    Fewer degrees that layers and sequences are split by go first, and of those the plan without a pipeline and with
    whole stages; then all on the device before offload. Experts over ranks that have samples of their own are no degree
    more beside others: a mixture is made to be spread so. Of whole models a replica goes before torch's shards, and
    those before ZeRO, which asks for one more library; what splits a model has one of its own for all of them.
    """
    splits = sum(degree > 1 for degree in (plan.tp, plan.pp, plan.cp)) or int(plan.ep > 1)
    pipeline = (plan.pp > 1) + (plan.virtual_stages > 1)
    return splits + pipeline, words.OFFLOADS.index(plan.offload), 0 if splits else _sharding(plan)


def _sharding(plan: Named) -> int:
    return 2 if plan.strategy in words.ZERO_STAGES else int(plan.strategy in words.FSDP_STRATEGIES)


def slower_threshold(one: Named, other: Named) -> float:
    """Return the share of a step time from which on one plan counts as slower than another."""
    if simplicity(one) == simplicity(other):
        return ONE_STRATEGY if one.strategy == other.strategy else NEVER_COMPARED
    only_split = (one.offload, _sharding(one)) == (other.offload, _sharding(other))
    return SPLIT_OR_WHOLE if only_split else NEVER_COMPARED


def widest_threshold(request: Request) -> float:
    """Return a share that `worse_threshold` never goes beyond for the request's plans."""
    unmeasured = NINE_OF_TEN * max(OUTSIDE_OF_CPUS.values()) if request.cluster.device.is_cpu else 0.0
    widest = 2 * max(unmeasured, widest_half_width(request.facts, request.workload))
    return max(NEVER_COMPARED, SPLIT_OR_WHOLE, ONE_STRATEGY, TWO_RUNS, math.exp(widest) - 1)


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

    Room in memory comes first, unless an offload or splitting the model makes it. Splitting is as good as a plan that
    is tight, and of these what has room goes first. Then comes simplicity. Plans that are equal in all are ranked by
    their times alone.
    """
    chosen = item.configuration
    if _gathers_beside_splits(item):
        splits, *others = simplicity(chosen)
        return (not item.has_room) + (chosen.offload != "none") + 1, True, splits + 1, *others
    level = (not item.has_room) + (chosen.offload != "none") + chosen.splits_model
    return level, not (item.has_room and chosen.offload == "none"), *simplicity(chosen)


def _gathers_beside_splits(item: Timed) -> bool:
    """Return whether ZeRO-3 all-gathers every weight over nodes where a code base's own layers split inside one.

    Who trains with Megatron's layers splits them over a node's ranks first, and shards no more than the optimizer's
    states (EleutherAI/pythia models/*/*.yml, BLOOM's arXiv 2211.05100 section 3.4, GPT-NeoX's arXiv 2204.06745).
    """
    chosen, code = item.configuration, code_base(item.priced.job.workload.code)
    over_nodes = chosen.dp_shard > item.priced.job.cluster.gpus_per_node
    return chosen.strategy == "zero3" and over_nodes and not code.runs_here and "tp" in code.degrees


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
    by_worth = sorted(items, key=lambda item: order(item, request.objective))
    resorts = [item for item in by_worth if waits_mostly(item.priced.job, item.time)]
    if resorts and len(resorts) < len(by_worth):
        # Last resorts come after all that computes, whatever the objective.
        return [*rank(request, [item for item in by_worth if item not in resorts]), *resorts]
    if not request.simplest_first or not by_worth:
        return by_worth
    # What was passed over inside its group is what others are compared with as well: thresholds must not add up.
    every = [*by_worth, *(item.passed_over for item in by_worth if item.passed_over is not None)]
    first = _preferred(sorted(every, key=lambda item: order(item, request.objective)), request.objective)
    name = group_name(first.configuration)
    return [first, *(item for item in by_worth if group_name(item.configuration) != name)]


SAFE_BELOW = 0.9
"""Share of the memory of a device from which on a plan is shown beside one that takes less."""


def is_safe(item: Timed) -> bool:
    """Return whether a plan has room and takes no more than SAFE_BELOW of a device."""
    job, need = item.priced.job, item.priced.memory.device_needed_bytes
    return item.has_room and need <= SAFE_BELOW * device_limit(job.workload, job.cluster)


def apart_from_doubles(ranked: Sequence[Timed]) -> tuple[list[Timed], tuple[Rejection, ...]]:
    """Return the plans, and those that are a better one under another name.

    Where no two ranks have samples of their own, there is nothing that ddp, zero1 and fsdp would do in different ways.
    """
    firsts: dict[tuple[int, ...], Timed] = {}
    doubles = []
    for item in ranked:
        chosen = item.configuration
        degrees = (chosen.world_size, chosen.tp, chosen.pp, chosen.cp, chosen.ep)
        is_alone = chosen.splits_model and chosen.offload == "none" and chosen.dims.data_parallel * chosen.cp == 1
        if is_alone and firsts.setdefault(degrees, item) is not item:
            same = group_name(firsts[degrees].configuration)
            reason = f"the same as {same}: one data-parallel rank shards nothing"
            doubles.append(Rejection(strategy=group_name(chosen), reason=reason, plan=item.plan))
    names = {item.strategy for item in doubles}
    return [item for item in ranked if group_name(item.configuration) not in names], tuple(doubles)


def _preferred(items: Sequence[Timed], objective: words.Objective) -> Timed:
    """Return the preferred one of those that are not clearly worse than the first, which is the best.

    It may also be what is preferred as much and no worse: of some pairs less is known than of others.
    """
    alike = [item for item in items if not clearly_worse(item, items[0], objective)]
    level = min(map(preference, alike))
    return next(item for item in items if preference(item) <= level)


def clearly_worse(item: Timed, best: Timed, objective: words.Objective) -> bool:
    """Return whether a plan is worse than the best one by more than the prediction of their ratio may be wrong.

    Shards of a small model are not worth it for a faster optimizer step, most of which a fused one takes away.
    """
    ratio = worth(item, objective) / worth(best, objective)
    if objective == "throughput" and _steps_unfused(item) and _is_replica(item) and _is_small(item):
        ratio = _without_optimizer(item.time) / _without_optimizer(best.time)
    return ratio > 1 + worse_threshold(item, best, objective)


def _steps_unfused(item: Timed) -> bool:
    return item.configuration.optimizer in ("adamw", "adamw-forloop") and not item.was_run


def _is_replica(item: Timed) -> bool:
    chosen = item.configuration
    return group_name(chosen) in words.REPLICAS


def _without_optimizer(time: StepTime) -> float:
    return time.step_seconds - time.optimizer_seconds


def worse_threshold(item: Timed, best: Timed, objective: words.Objective) -> float:
    """Return by how much a plan must be worse than another to count as worse.

    Memory is predicted well enough to be compared as it is, and who asks for cost gets the cheapest; two plans that
    this machine has run differ by what a run does when it is made again. A pipeline or an offload that a whole model on
    the devices can do without has to win by more than the interval of the ratio; where the model is small, by so much
    that the ranges of nine of ten steps are apart.
    """
    if objective in ("memory", "cost") or preference(item) == preference(best):
        return 0.0
    if item.was_run and best.was_run:
        return TWO_RUNS
    usual = slower_threshold(item.configuration, best.configuration)
    plain, other = item.configuration, best.configuration
    if plain.splits_model or plain.offload != "none" or (other.pp == 1 and other.offload == "none"):
        return usual
    spreads = _spread(item), _spread(best)
    return max(usual, math.exp(NINE_OF_TEN * (sum(spreads) if _is_small(item) else math.hypot(*spreads))) - 1)


def _is_small(item: Timed) -> bool:
    """Return whether whole copies of the model, with all that is trained of it, leave half of each device."""
    job = item.priced.job
    return 2 * BYTES_PER_PARAMETER * job.counts.total <= device_limit(job.workload, job.cluster)


def _spread(item: Timed) -> float:
    spread = spread_of(item.priced.job)
    return spread.outside if item.priced.experience.calibration is None else spread.inside


def group_name(plan: Named) -> str:
    """Plans of one group compete with each other; the best of each is shown."""
    name = strategy_name(plan)
    return name if plan.offload == "none" else f"{name} + offload {plan.offload}"


def strategy_name(plan: Named) -> str:
    """Return the strategy, and whether layers, sequences or experts are split as well."""
    splits = {"tp/pp" if plan.pp > 1 else "tp": plan.tp * plan.pp, "cp": plan.cp, "ep": plan.ep}
    split = "/".join(name for name, degree in splits.items() if degree > 1)
    return f"{plan.strategy} + {split}" if split else plan.strategy


def rejections(
    request: Request, ranked: Sequence[Timed], missing: Sequence[Priced], doubles: Sequence[Rejection] = ()
) -> tuple[Rejection, ...]:
    """Return why each strategy beyond the shown ones is not among them: slower, too large, or senseless here."""
    rejected = []
    for item in ranked[request.top :]:
        reason = compare(request, item, ranked[0])
        rejected.append(Rejection(strategy=group_name(item.configuration), reason=reason, plan=item.plan))
    for priced in missing:
        name, plan = strategy_name(priced.job.configuration), plan_of(priced, step_time(priced.job))
        rejected.append(Rejection(strategy=name, reason=_why_missing(priced), plan=plan))
    named = {item.strategy for item in (*rejected, *doubles)} | {strategy_name(item.configuration) for item in ranked}
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


def why_first(request: Request, ranked: Sequence[Timed], safe: Timed | None = None) -> str:
    """Return why the first plan is first, in one line; and that the second is safe where the first is not."""
    first, objective = ranked[0], request.objective
    best = min(ranked, key=lambda item: order(item, objective))
    reason = f"{group_name(first.configuration)} {_IS_BEST[objective]}"
    if best is not first:
        width = worse_threshold(first, best, objective)
        name, other = group_name(first.configuration), group_name(best.configuration)
        why = f"{name} is simpler than {other}" if best.has_room else f"{name} has more room in memory than {other}"
        aside = ""
        if objective == "throughput" and worth(first, objective) / worth(best, objective) > 1 + width:
            apart = _without_optimizer(first.time) / _without_optimizer(best.time) - 1
            aside = f" ({apart:.0%} without the optimizer's step, which --optimizer adamw-fused shortens)"
        reason = f"{why}, which is predicted {ahead(first, best, objective)}{aside}{told_apart(width)}"
    if first.passed_over is not None:
        reason += f"; {_without_room(first, first.passed_over, objective)}"
    if not first.has_room:
        reason += f"; it {_tight(first)}"
    if safe is not None:
        used = safe.priced.memory.device_needed_bytes / device_limit(safe.priced.job.workload, safe.priced.job.cluster)
        reason += f"; the second plan has room, at {used:.0%} of the memory"
    return reason


def told_apart(width: float) -> str:
    """Return from which difference on two plans are told apart; none where it is anything."""
    if width >= 1:
        times = f"{1 + width:.1f}x as fast as the other"
        return f"; the two cannot be told apart by prediction: one would have to be predicted {times}"
    return f"; two such plans are told apart only where one is at least {width:.0%} faster" if width else ""


def _tight(item: Timed) -> str:
    """Return that a plan fits without room: `needs 77.0 GiB of 79.1 GiB, where one run in ten takes 21% more`."""
    job, need = item.priced.job, item.priced.memory.device_needed_bytes
    limit = device_limit(job.workload, job.cluster)
    on_host, host = item.priced.memory.host_bytes_per_node, host_limit(job.workload, job.cluster)
    if host and on_host > TIGHT_ABOVE * host:
        return f"needs {format_bytes(on_host)} of the {format_bytes(host)} of host memory"
    more = f"{memory_headroom(job).crowded:.0%} more"
    if need > limit:
        least = format_bytes(item.priced.memory.device_least_bytes)
        return f"needs {format_bytes(need)} with every margin and {least} without any, of {format_bytes(limit)}"
    return f"needs {format_bytes(need)} of {format_bytes(limit)}, where one run in ten takes {more}"


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
