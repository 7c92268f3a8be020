"""Ranking: which of two plans that fit goes first, and how the loser's reason is said."""

from __future__ import annotations

from dataclasses import dataclass

from planner import vocabulary as words
from planner.candidates import inapplicable
from planner.estimate import Priced, plan_of, unrunnable
from planner.plan import Configuration, Plan, StepTime
from planner.request import Request
from planner.timing import step_time

PREFERENCE = {
    "single": 0.0,
    "ddp": 0.0,
    "fsdp": 0.25,
    "fsdp-grad-op": 0.25,
    "hsdp": 0.25,
    "zero1": 0.28,
    "zero2": 0.28,
    "zero3": 0.30,
}
"""How much faster a strategy must be predicted than a simpler one to go before it. A replica that fits is what people
run, and 25 % is what published step times still differ from predicted ones at the 90th percentile
(docs/cost-model-time.md); among the sharded strategies the one that needs only torch goes first when times are
close."""
PREFERENCE_SQUEEZED = 0.25
"""A replica that fits only by recomputation is no simpler than shards that fit without."""
PREFERENCE_MODEL_PARALLEL = 0.25
"""Splitting layers asks more of the script than any data-parallel strategy."""
PREFERENCE_OFFLOAD = 0.15
"""The same for a plan that offloads: no published step time with offload stands behind its prediction yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A strategy that is not among the plans; `plan` is its best one where it fits, else its closest miss."""

    strategy: str
    reason: str
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A configuration that fits, with its step time."""

    priced: Priced
    time: StepTime

    @property
    def configuration(self) -> Configuration:
        return self.priced.job.configuration

    @property
    def plan(self) -> Plan:
        return plan_of(self.priced, self.time)


def score(item: Timed, objective: words.Objective) -> tuple[float, float]:
    """What the objective makes smallest, then memory, so that equal plans always rank in the same order."""
    memory = float(item.priced.memory.device_used_bytes)
    preference = PREFERENCE[item.configuration.strategy]
    if item.configuration.activation_checkpointing != "none":
        preference = max(preference, PREFERENCE_SQUEEZED)
    if item.configuration.offload != "none":
        preference += PREFERENCE_OFFLOAD
    if item.configuration.tp * item.configuration.pp > 1:
        preference += PREFERENCE_MODEL_PARALLEL
    seconds = item.time.step_seconds * (1 + preference)
    if objective == "cost":
        return seconds * item.configuration.world_size, memory
    return (memory, seconds) if objective == "memory" else (seconds, memory)


def rank(request: Request, items: list[Timed]) -> list[Timed]:
    """Best first; a plan that `dsplan run` can run leads unless the request allows otherwise."""
    ranked = sorted(items, key=lambda item: score(item, request.objective))
    first = next((item for item in ranked if not unrunnable(item.configuration)), None)
    if request.allow_unrunnable or first is None:
        return ranked
    return [first, *(item for item in ranked if item is not first)]


def group_name(configuration: Configuration) -> str:
    """Plans of one group compete with each other; the best of each is shown."""
    name = strategy_name(configuration)
    return name if configuration.offload == "none" else f"{name} + offload {configuration.offload}"


def strategy_name(configuration: Configuration) -> str:
    """The strategy, and whether layers are split as well."""
    return f"{configuration.strategy} + tp/pp" if configuration.tp * configuration.pp > 1 else configuration.strategy


def rejections(request: Request, ranked: list[Timed], missing: dict[str, Priced]) -> tuple[Rejection, ...]:
    """Why each strategy beyond the shown ones is not among them: slower, too large, or senseless here."""
    rejected = []
    first = ranked[0].plan if ranked else None
    for item in ranked[request.top :]:
        plan = item.plan
        reason = compared(request, plan, first or plan)
        rejected.append(Rejection(strategy=group_name(item.configuration), reason=reason, plan=plan))
    seen = {strategy_name(item.configuration) for item in ranked}
    for name, priced in missing.items():
        if name not in seen:
            closest = plan_of(priced, step_time(priced.job))
            rejected.append(Rejection(strategy=name, reason=_miss(priced), plan=closest))
    for strategy in words.STRATEGIES:
        senseless = inapplicable(request, strategy)
        if senseless:
            rejected.append(Rejection(strategy=strategy, reason=senseless))
    return tuple(rejected)


def compared(request: Request, plan: Plan, first: Plan) -> str:
    """How a plan that fits compares with the first one, in what the objective counts."""
    blocked = "" if plan.runnable else f"; {plan.notes[0]}"
    if request.objective == "memory":
        ratio = plan.memory.device_used_bytes / first.memory.device_used_bytes
        return f"fits, {ratio:.2f}x the memory{blocked}"
    ratio = plan.time.step_seconds / first.time.step_seconds
    if request.objective == "cost":
        ratio *= plan.configuration.world_size / first.configuration.world_size
        gpus = plan.configuration.world_size
        return f"fits, {ratio:.2f}x the GPU-seconds, on {gpus} {'GPU' if gpus == 1 else 'GPUs'}{blocked}"
    passed_over = "; simpler plans go first unless clearly slower" if ratio < 0.995 and plan.runnable else ""
    return f"fits, {ratio:.2f}x the step time, limited by {plan.limited_by}{blocked}{passed_over}"


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
