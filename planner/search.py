"""Search: the best plan of every strategy, ranked; the reason of every one that is not.

The search does not know how memory and time are computed. For each shape it finds by bisection the largest micro-batch
that fits (memory grows with it), so the global batch is always the one asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from planner import vocabulary as words
from planner.candidates import Shape, divisors, inapplicable, shapes
from planner.errors import ContradictoryRequest
from planner.estimate import Priced, plan_of, price, unrunnable
from planner.plan import Configuration, Plan, StepTime
from planner.remedies import Remedy, remedies
from planner.request import Request
from planner.timing import step_time

PREFERENCE = {"single": 0.0, "ddp": 0.0, "fsdp": 0.03, "fsdp-grad-op": 0.03, "hsdp": 0.03, "zero1": 0.06, "zero2": 0.06}
PREFERENCE_OTHERWISE = 0.08
PREFERENCE_OFFLOAD = 0.02
"""How much faster a strategy must be predicted than a simpler one to go before it. Predictions are no closer to the truth
than this (docs/cost-model-time.md), and what they leave out (hooks, flattening, host work) grows in the same order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A strategy that is not among the plans; `plan` is its best one where it fits, else its closest miss."""

    strategy: str
    reason: str
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Ranked plans, best first; without one, the closest miss and what would help."""

    request: Request
    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    closest: Plan | None = None
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    priced: Priced
    time: StepTime

    @property
    def configuration(self) -> Configuration:
        return self.priced.job.configuration


def recommend(request: Request) -> Recommendation:
    """Rank every plan that fits.

    Raises:
        ContradictoryRequest: the global batch cannot be split over the GPUs.
    """
    _check_batch(request)
    fitting: dict[str, list[_Timed]] = {}
    missing: dict[str, Priced] = {}
    for shape in shapes(request):
        _explore(request, shape, fitting, missing)
    best = [min(group, key=_score(request)) for group in fitting.values()]
    ranked = _runnable_first(request, sorted(best, key=_score(request)))
    shown = ranked[: request.top]
    rejected = _rejections(request, shown, ranked, missing)
    if shown:
        alternatives = tuple({"strategy": item.strategy, "reason": item.reason} for item in rejected)
        plans = tuple(plan_of(item.priced, item.time) for item in shown)
        others = tuple({"strategy": describe(plan), "reason": _slower(plan, plans[0])} for plan in plans[1:])
        first = replace(plans[0], alternatives=others + alternatives)
        return Recommendation(request=request, plans=(first, *plans[1:]), rejected=rejected)
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
    return _group(plan.configuration)


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


def _check_batch(request: Request) -> None:
    batch, gpus = request.workload.global_batch_size, request.cluster.gpus
    if batch % gpus and not request.allow_unrunnable:
        below = batch - batch % gpus
        nearest = f"{below} or {below + gpus}" if below else str(gpus)
        raise ContradictoryRequest(
            f"global batch {batch} cannot be split evenly over {gpus} GPUs; use {nearest}, or --all-plans for plans"
            " with fewer data-parallel ranks"
        )


def _explore(request: Request, shape: Shape, fitting: dict[str, list[_Timed]], missing: dict[str, Priced]) -> None:
    """Price the micro-batches of one shape, and file what was found under its strategy."""
    micros = _micro_batches(request, shape)
    if not micros:
        return
    smallest = price(request, configuration_of(request, shape, micros[0]))
    if smallest.judgement.verdict == "does_not_fit":
        known = missing.get(shape.strategy)
        if known is None or smallest.judgement.pressure < known.judgement.pressure:
            missing[shape.strategy] = smallest
        return
    group = fitting.setdefault(_group(smallest.job.configuration), [])
    group.extend(_largest(request, shape, micros, smallest))


def _micro_batches(request: Request, shape: Shape) -> tuple[int, ...]:
    batch = request.workload.global_batch_size
    sizes = divisors(batch // shape.data_parallel) if batch % shape.data_parallel == 0 else ()
    return sizes if request.micro_batch is None else tuple(size for size in sizes if size == request.micro_batch)


def _largest(request: Request, shape: Shape, micros: tuple[int, ...], smallest: Priced) -> Iterable[_Timed]:
    """The largest micro-batch that fits and the one below it; in a pipeline every one, since smaller ones shrink the
    bubble."""
    low, high, found = 0, len(micros) - 1, {0: smallest}
    while low < high:
        middle = (low + high + 1) // 2
        priced = price(request, configuration_of(request, shape, micros[middle]))
        if priced.judgement.verdict == "does_not_fit":
            high = middle - 1
        else:
            low, found[middle] = middle, priced
    wanted = range(low + 1) if shape.pp > 1 else range(max(low - 1, 0), low + 1)
    for index in wanted:
        priced = found.get(index) or price(request, configuration_of(request, shape, micros[index]))
        yield _Timed(priced=priced, time=step_time(priced.job))


def _score(request: Request) -> Callable[[_Timed], tuple[float, float]]:
    """What the objective makes smallest, then memory, so that equal plans always rank in the same order."""

    def score(item: _Timed) -> tuple[float, float]:
        memory = float(item.priced.memory.device_used_bytes)
        preference = PREFERENCE.get(item.configuration.strategy, PREFERENCE_OTHERWISE)
        if item.configuration.offload != "none":
            preference += PREFERENCE_OFFLOAD
        seconds = item.time.step_seconds * (1 + preference)
        return (memory, seconds) if request.objective == "memory" else (seconds, memory)

    return score


def _runnable_first(request: Request, ranked: list[_Timed]) -> list[_Timed]:
    if request.allow_unrunnable:
        return ranked
    first = next((item for item in ranked if not unrunnable(item.configuration)), None)
    return ranked if first is None else [first, *(item for item in ranked if item is not first)]


def _group(configuration: Configuration) -> str:
    """Plans of one group compete with each other; the best of each is shown."""
    parts: list[str] = [configuration.strategy]
    if configuration.tp > 1 or configuration.pp > 1:
        parts.append("tp/pp")
    if configuration.offload != "none":
        parts.append(f"offload {configuration.offload}")
    return " + ".join(parts)


def _rejections(
    request: Request, shown: list[_Timed], ranked: list[_Timed], missing: dict[str, Priced]
) -> tuple[Rejection, ...]:
    rejected = []
    seen = {item.configuration.strategy for item in ranked}
    for item in ranked[len(shown) :]:
        plan = plan_of(item.priced, item.time)
        reason = _slower(plan, plan_of(shown[0].priced, shown[0].time))
        rejected.append(Rejection(strategy=_group(item.configuration), reason=reason, plan=plan))
    for strategy in words.STRATEGIES:
        reason = inapplicable(request, strategy)
        if reason:
            rejected.append(Rejection(strategy=strategy, reason=reason))
        elif strategy in missing and strategy not in seen:
            priced = missing[strategy]
            plan = plan_of(priced, step_time(priced.job))
            rejected.append(Rejection(strategy=strategy, reason=_miss(priced), plan=plan))
    return tuple(rejected)


def _miss(priced: Priced) -> str:
    """Why a strategy's closest configuration does not fit."""
    configuration = priced.job.configuration
    savers = []
    if configuration.activation_checkpointing != "none":
        savers.append(f"{configuration.activation_checkpointing} checkpointing")
    if configuration.offload != "none":
        savers.append(f"offload {configuration.offload}")
    with_what = f" with {' and '.join(savers)}" if savers else ""
    return f"{priced.judgement.reason} even at micro-batch {configuration.micro_batch_size}{with_what}"


def _slower(plan: Plan, first: Plan) -> str:
    ratio = plan.time.step_seconds / first.time.step_seconds
    if ratio < 1:
        return f"{1 / ratio:.2f}x as fast, but {plan.notes[0]}" if not plan.runnable else f"{1 / ratio:.2f}x as fast"
    return f"fits, {ratio:.2f}x the step time, limited by {plan.limited_by}"
