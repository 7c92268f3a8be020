"""Advice: changes of a question that help more than another plan would, each tried before it is offered.

A trial keeps the first plan's strategy and degrees and searches what is left, so that it costs a fraction of a search
and promises no more than that plan keeps; only beside a plan that offloads, what frees memory may give up the offload
for any degrees of the plan's strategy. What is offered changes the code, the numerics or the training: it stays the
user's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hardware_db.records import dataclass
from hardware_db.units import format_seconds
from planner.cluster.budget import NO_BUDGET
from planner.cost.code_bases import code_base, facts_for_code
from planner.errors import ContradictoryRequest
from planner.search.device_counts import device_counts, on_fewer_devices
from planner.search.request import Degrees, Request
from planner.types.job import Workload
from planner.types.plan import Plan
from planner.vocabulary import POST_TRAINING, REPLICAS, Objective, Strategy

First = Callable[[Request, float], Plan | None]
"""The first plan of a request; None without one that takes at most so many seconds a step."""

WORTH_SAYING = 0.10
"""Gain in speed from which on a change is offered; a choice, above what a plan's neighbours differ by."""
MOST_OFFERED = 3
BATCH_TIMES = 4
"""By how much a larger global batch is tried."""
FREES_MEMORY = frozenset({"attention", "loss", "precision"})
"""Fields of the work whose changes may make an offload needless; an 8-bit optimizer is the fourth."""
KEEPS_SPEED = 0.85
"""Share of the speed that fewer GPUs have to keep for the others to be called idle; a choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One change of the question: `flag` asks for it, `speed` is how often as many samples a second it makes.

    `gain` says that in words. Of fewer GPUs the speed is that of each.
    """

    change: str
    flag: str
    gain: str
    speed: float


def advise(request: Request, plan: Plan, first: First) -> tuple[Advice, ...]:
    """Return the changes that are worth most beside a request's first plan, best first."""
    if request.cluster.device.is_cpu or request.strategies is not None or request.degrees is not None:
        return ()  # what a script decided is not for a plan to change
    there = _on_the_devices_of(plan, request)
    offered = [*_by_workload(there, plan, first), *_by_code(there, plan, first), *_by_fewer(request, plan, first)]
    offered.sort(key=lambda item: -item.speed)
    return tuple(offered[:MOST_OFFERED])


def _on_the_devices_of(plan: Plan, request: Request) -> Request:
    """Return the request on as many devices as the plan takes, which are fewer where cost counts."""
    gpus = plan.configuration.world_size
    return next((option for option in device_counts(request) if option.cluster.gpus == gpus), request)


def _by_workload(request: Request, plan: Plan, first: First) -> Iterator[Advice]:
    """Yield changes of the work that make it faster."""
    for change, flag, changes in _changes(request, plan):
        frees = not FREES_MEMORY.isdisjoint(changes) or "8bit" in changes.get("optimizer", "")
        changed = _alike(request, plan, workload=replace(request.workload, **changes), frees_memory=frees)
        tried = _tried(first, changed, plan, 1 + WORTH_SAYING)
        speed = 0.0 if tried is None else _speed(tried) / _speed(plan)
        if tried is not None and speed >= 1 + WORTH_SAYING:
            yield Advice(change=change, flag=flag, gain=faster(speed, _step_text(tried)), speed=speed)


def _changes(request: Request, plan: Plan) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what may be changed of the work: in words, as a flag, and the fields of the workload."""
    work, facts = request.workload, request.facts
    batch = BATCH_TIMES * work.global_batch_size
    if work.post is not None and work.generates:  # as many optimizer steps a round as before
        post = replace(work.post, prompts_per_step=BATCH_TIMES * work.post.prompts_per_step)
        yield (
            f"take rounds of {post.prompts_per_step} prompts, if the training allows it",
            f"--prompts-per-step {post.prompts_per_step} --global-batch {batch}",
            {"global_batch_size": batch, "post": post},
        )
    else:
        yield (
            f"take a global batch of {batch}, if the training allows it",
            f"--global-batch {batch}",
            {"global_batch_size": batch},
        )
    if not code_base(work.code).runs_here:
        return
    if facts.fused_by_flash and work.attention != "flash":
        yield "run FlashAttention, which takes the model's sinks", "--attention flash", {"attention": "flash"}
    if facts.vocab_size and work.loss == "plain" and facts.kind == "decoder":
        yield "fuse head and loss (Liger), which keeps no logits", "--loss fused", {"loss": "fused"}
    if not work.compile and facts.kind == "decoder" and not facts.recorded_as and work.method == "full":
        yield "compile the blocks", "--compile", {"compile": True}
    if work.method != "full":
        return
    if work.optimizer in ("adamw", "adamw-forloop"):
        yield "step the optimizer in one kernel", "--optimizer adamw-fused", {"optimizer": "adamw-fused"}
    if work.optimizer.startswith("adamw") and "bit" not in work.optimizer:
        yield "keep the optimizer's moments in 8 bits", "--optimizer adamw-8bit", {"optimizer": "adamw-8bit"}
    if work.precision == "bf16" and plan.configuration.strategy not in REPLICAS:
        yield "keep weights and states in bf16", "--precision bf16-pure", {"precision": "bf16-pure"}


def _by_code(request: Request, plan: Plan, first: First) -> Iterator[Advice]:
    """Yield torchtitan's compiled blocks, for decoders that transformers pre-trains in shards."""
    work, facts = request.workload, request.facts
    apart = work.code != "transformers" or work.method != "full" or facts.kind != "decoder" or bool(facts.recorded_as)
    apart = apart or work.task in POST_TRAINING or work.precision not in ("bf16", "fp8")
    if apart or plan.configuration.strategy in REPLICAS:
        return
    changed = replace(work, code="torchtitan", compile=True)
    strategy: Strategy = "hsdp" if plan.configuration.strategy == "hsdp" else "fsdp"
    there = replace(
        _alike(request, plan, workload=changed),
        facts=facts_for_code(facts, "torchtitan"),
        strategies=(strategy,),
        allow_unrunnable=True,
        offload="none",
    )
    tried = _tried(first, there, plan, 1 + WORTH_SAYING)
    speed = 0.0 if tried is None else _speed(tried) / _speed(plan)
    if tried is not None and speed >= 1 + WORTH_SAYING:
        flag = "--code torchtitan --compile"
        yield Advice(change="train with torchtitan", flag=flag, gain=faster(speed, _step_text(tried)), speed=speed)


def _by_fewer(request: Request, plan: Plan, first: First) -> Iterator[Advice]:
    """Yield the fewest GPUs beyond which more add hardly anything."""
    if request.objective == "cost" or request.budget != NO_BUDGET:
        return
    enough: Plan | None = None
    there = _alike(request, plan, workload=request.workload)
    for fewer in on_fewer_devices(there):
        strategy: Strategy = "single" if fewer.cluster.gpus == 1 else plan.configuration.strategy
        tried = _tried(first, replace(fewer, strategies=(strategy,)), plan, KEEPS_SPEED)
        if tried is None or _speed(tried) < KEEPS_SPEED * _speed(plan):
            break
        enough = tried
    if enough is None:
        return
    gpus, kept = enough.configuration.world_size, _speed(enough) / _speed(plan)
    share = f"{kept:.0%} of the speed on {gpus / request.cluster.gpus:.0%} of the GPUs"
    yield Advice(
        change=f"use {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
        flag=f"--gpus {gpus}",
        gain=f"{share} ({format_seconds(enough.time.step_seconds)} a step)",
        speed=kept * request.cluster.gpus / gpus,
    )


def _alike(request: Request, plan: Plan, *, workload: Workload, frees_memory: bool = False) -> Request:
    """Return the request with other work, for plans of the same strategy, degrees and offload.

    Where the work `frees_memory` that the plan offloads: for plans of that strategy, or fsdp, on the devices alone.
    """
    chosen = plan.configuration
    objective: Objective = "memory" if request.objective == "memory" else "throughput"  # like is compared with like
    free = replace(request, workload=workload, objective=objective, budget=NO_BUDGET, to_the_limit=False)
    if frees_memory and chosen.offload != "none" and request.offload is None:
        others: tuple[Strategy, ...] = () if chosen.strategy in (*REPLICAS, "fsdp") else ("fsdp",)
        return replace(free, strategies=(chosen.strategy, *others), offload="none")
    degrees = Degrees(
        tp=chosen.tp,
        pp=chosen.pp,
        cp=chosen.cp,
        ep=chosen.ep,
        pp_schedule=chosen.pp_schedule if chosen.pp > 1 else None,
        virtual_stages=chosen.virtual_stages if chosen.pp > 1 else None,
        sequence_parallel=chosen.sequence_parallel,
    )
    return replace(free, strategies=(chosen.strategy,), degrees=degrees, offload=chosen.offload)


def _tried(first: First, request: Request, plan: Plan, speed: float) -> Plan | None:
    """Return the first plan of a changed request, if any of its plans has at least so many times a plan's speed."""
    try:
        return first(request, request.workload.global_batch_size / (speed * _speed(plan)))
    except ContradictoryRequest:  # what was changed does not go with the rest
        return None


def _speed(plan: Plan) -> float:
    return plan.throughput.samples_per_second


def _step_text(plan: Plan) -> str:
    return f"{format_seconds(plan.time.step_seconds)} a step"


def faster(speed: float, step: str) -> str:
    """Return so many times as many samples a second in words, with the step: `2.4x as fast (3.77 s a step)`."""
    times = f"{speed:.1f}x as fast" if speed >= 2 else f"{speed - 1:.0%} faster"
    return f"{times} ({step})"
