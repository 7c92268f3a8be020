"""Search: the best plan of every strategy, ranked; the reason of every one that is not.

The search does not know how memory and time are computed. For each shape it finds by bisection the largest micro-batch
that fits (memory grows with it), so the global batch is always the one asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner import vocabulary as words
from planner.candidates import Shape, divisors, shapes
from planner.errors import ContradictoryRequest
from planner.estimate import Priced, plan_of, price, unrunnable
from planner.plan import Configuration, Plan
from planner.ranking import Rejection, Timed, compared, group_name, rank, rejections, score, strategy_name
from planner.remedies import Remedy, remedies
from planner.request import Request
from planner.timing import step_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Ranked plans, best first; without one, the closest miss and what would help."""

    request: Request
    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    closest: Plan | None = None
    remedies: tuple[Remedy, ...] = ()


def recommend(request: Request) -> Recommendation:
    """Rank every plan that fits.

    Raises:
        ContradictoryRequest: the global batch cannot be split over the GPUs.
    """
    _check_batch(request)
    fitting: dict[str, list[Timed]] = {}
    missing: dict[str, Priced] = {}
    for option in _options(request):
        settled: set[Shape] = set()
        for shape in shapes(option):
            bare = replace(shape, checkpointing="none")
            if bare not in settled and _explore(option, shape, fitting, missing) and request.objective != "memory":
                settled.add(bare)
    best = [min(group, key=lambda item: score(item, request.objective)) for group in fitting.values()]
    ranked = rank(request, best)
    rejected = rejections(request, ranked, missing)
    if ranked:
        plans = _with_alternatives(request, tuple(item.plan for item in ranked[: request.top]), rejected)
        return Recommendation(request=request, plans=plans, rejected=rejected)
    if not missing:
        raise ContradictoryRequest(
            f"global batch {request.workload.global_batch_size} cannot be split over {request.cluster.gpus} GPUs"
        )
    closest = min(missing.values(), key=lambda priced: priced.judgement.pressure)
    return Recommendation(
        request=request,
        plans=(),
        rejected=rejected,
        closest=plan_of(closest, step_time(closest.job)),
        remedies=remedies(request, can_fit),
    )


def can_fit(request: Request) -> Priced | None:
    """Any plan of one sample per GPU that fits, in the order of `shapes`; None where there is none."""
    for shape in shapes(request):
        micros = _micro_batches(request, shape)
        if micros:
            priced = price(request, configuration_of(request, shape, micros[0]))
            if priced.judgement.verdict != "does_not_fit" and (
                request.allow_unrunnable or not unrunnable(priced.job.configuration)
            ):
                return priced
    return None


def describe(plan: Plan) -> str:
    """A plan's strategy with its degrees and offload, as tables name it."""
    return group_name(plan.configuration)


def configuration_of(request: Request, shape: Shape, micro_batch: int) -> Configuration:
    """The configuration of a shape with a micro-batch that divides the samples of a rank."""
    workload = request.workload
    return Configuration(
        strategy=shape.strategy,
        backend=words.default_backend(shape.strategy),
        dp_replicate=shape.dp_replicate,
        dp_shard=shape.dp_shard,
        tp=shape.tp,
        pp=shape.pp,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=workload.global_batch_size // (shape.data_parallel * micro_batch),
        global_batch_size=workload.global_batch_size,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
        optimizer=workload.optimizer,
        attention=workload.attention,
        activation_checkpointing=shape.checkpointing,
        offload=shape.offload,
    )


def _with_alternatives(request: Request, plans: tuple[Plan, ...], rejected: tuple[Rejection, ...]) -> tuple[Plan, ...]:
    """The plans, the first of them knowing what it was chosen over."""
    others = [{"strategy": describe(plan), "reason": compared(request, plan, plans[0])} for plan in plans[1:]]
    others += [{"strategy": item.strategy, "reason": item.reason} for item in rejected]
    return (replace(plans[0], alternatives=tuple(others)), *plans[1:])


def _check_batch(request: Request) -> None:
    batch, gpus = request.workload.global_batch_size, request.cluster.gpus
    if batch % gpus and not request.allow_unrunnable:
        below = batch - batch % gpus
        nearest = f"{below} or {below + gpus}" if below else str(gpus)
        raise ContradictoryRequest(
            f"global batch {batch} cannot be split evenly over {gpus} GPUs; use {nearest}, or --all-plans for plans"
            " with fewer data-parallel ranks"
        )


def _options(request: Request) -> Iterator[Request]:
    """The request itself; where cost counts, also on half the GPUs, a quarter and so on: GPU-seconds are what is
    paid."""
    yield request
    cluster = request.cluster
    while request.objective == "cost" and cluster.gpus > 1 and cluster.gpus % 2 == 0:
        if cluster.nodes % 2 == 0:
            cluster = replace(cluster, nodes=cluster.nodes // 2)
        elif cluster.nodes == 1:
            host = cluster.host_memory_bytes_per_node // 2
            cluster = replace(cluster, gpus_per_node=cluster.gpus_per_node // 2, host_memory_bytes_per_node=host)
        else:
            return
        yield replace(request, cluster=cluster)


def _explore(request: Request, shape: Shape, fitting: dict[str, list[Timed]], missing: dict[str, Priced]) -> bool:
    """Price the micro-batches of one shape, and file what was found under its strategy.

    True if a rank's whole batch fits at once: recomputing more of it would then only cost time.
    """
    micros = _micro_batches(request, shape)
    if not micros:
        return False
    smallest = price(request, configuration_of(request, shape, micros[0]))
    if smallest.judgement.verdict == "does_not_fit":
        name = strategy_name(smallest.job.configuration)
        known = missing.get(name)
        if known is None or smallest.judgement.pressure < known.judgement.pressure:
            missing[name] = smallest
        return False
    found = list(_largest(request, shape, micros, smallest))
    fitting.setdefault(group_name(smallest.job.configuration), []).extend(found)
    return any(item.configuration.micro_batch_size == micros[-1] for item in found)


def _micro_batches(request: Request, shape: Shape) -> tuple[int, ...]:
    batch = request.workload.global_batch_size
    sizes = divisors(batch // shape.data_parallel) if batch % shape.data_parallel == 0 else ()
    return sizes if request.micro_batch is None else tuple(size for size in sizes if size == request.micro_batch)


def _largest(request: Request, shape: Shape, micros: tuple[int, ...], smallest: Priced) -> Iterable[Timed]:
    """The largest micro-batch that fits, and the one below it where that is tight; in a pipeline also smaller ones, for
    as long as the bubble that they shrink is worth more than the speed that they cost."""
    low, high, found = 0, len(micros) - 1, {0: smallest}
    middle = high  # often all of them fit
    while low < high:
        priced = price(request, configuration_of(request, shape, micros[middle]))
        if priced.judgement.verdict == "does_not_fit":
            high = middle - 1
        else:
            low, found[middle] = middle, priced
        middle = (low + high + 1) // 2
    largest = found[low]
    tight, seconds = largest.judgement.verdict == "tight", float("inf")
    for index in range(low, -1, -1):
        priced = found.get(index) or price(request, configuration_of(request, shape, micros[index]))
        timed = Timed(priced=priced, time=step_time(priced.job))
        yield timed
        is_better, seconds = timed.time.step_seconds < seconds, timed.time.step_seconds
        if not (is_better if shape.pp > 1 else tight and index == low):
            break
    if not shape.is_model_parallel:
        yield from _reduced_once(request, largest)


def _reduced_once(request: Request, priced: Priced) -> Iterator[Timed]:
    """The same with one reduction per step, where FSDP accumulates and whole gradients fit."""
    configuration = priced.job.configuration
    if configuration.strategy not in words.FSDP_STRATEGIES or configuration.gradient_accumulation_steps == 1:
        return
    once = price(request, replace(configuration, sync_each_micro_batch=False))
    if once.judgement.verdict != "does_not_fit":
        yield Timed(priced=once, time=step_time(once.job))
