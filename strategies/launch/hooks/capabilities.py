"""Strategies and backends that each kind of script can run, and refusals of requests beyond them. No torch."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from planner import vocabulary as words
from planner.types.plan import Plan
from strategies.errors import CannotRun
from strategies.run_directory import claim
from strategies.run_directory.request import named, plan_request
from strategies.run_directory.spec import ScriptKind
from strategies.supervision.failures import own_line

_WHO: Mapping[ScriptKind, str] = {
    "huggingface": "HF Trainer",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
}
_ON_ACCELERATE = ("huggingface", "accelerate")
LIBRARIES = "dsplan, HF Trainer, accelerate, DeepSpeed, Lightning, DDP and FSDP"

# deepspeed.initialize knows data parallelism (stage 0) and its own ZeRO.
_DEEPSPEED: tuple[words.Strategy, ...] = ("single", "ddp", "zero1", "zero2", "zero3")


def requested_flags() -> str:
    """Return the flags of the plan as they stood on the command line; empty where everything was left open."""
    request = plan_request()
    single = {name: getattr(request, name) for name in ("strategy", "backend", "rates")} | {"plan": request.plan_file}
    flags = {name: value for name, value in single.items() if value}
    return " ".join([*_spell(flags | named(request.degrees)), *_module_flags()])


def _spell(flags: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]


def _module_flags() -> list[str]:
    """Return the flags that change a model's modules."""
    request = plan_request()
    kernels = [name if kernel == "all" else f"{kernel}={name}" for kernel, name in request.kernels.items()]
    return [*_spell(named(request.method)), *([f"--kernels {','.join(kernels)}"] if kernels else [])]


def strategies_of(kind: ScriptKind, *, gpus: bool) -> tuple[words.Strategy, ...]:
    """Return the strategies that a kind of script can run, on GPUs or on CPU ranks."""
    if kind == "huggingface" and gpus:
        # TrainingArguments takes hsdp as an object only, which no file of a plan can hold.
        return tuple(name for name in words.STRATEGIES if name != "hsdp")
    return _DEEPSPEED if kind == "deepspeed" else words.STRATEGIES


def backends_of(kind: ScriptKind, strategy: words.Strategy, *, gpus: bool) -> tuple[words.Backend, ...]:
    """Return the backends with which a kind of script can run a strategy, the one to take first."""
    if kind == "deepspeed":
        return ("deepspeed",)
    if kind == "torch":
        return ("native" if strategy in words.ZERO_STAGES else "torch",)
    if kind in _ON_ACCELERATE and strategy in words.ZERO_STAGES and not gpus:
        # accelerate 1.15 takes CPU ranks under DeepSpeed for worlds of their own (strategies/launch/hooks/sharded.py).
        return ("native",)
    return words.backends_of(strategy)


def runnable_strategies(kind: ScriptKind, *, gpus: bool) -> tuple[words.Strategy, ...]:
    """Return the strategies that a kind of script can run with the requested backend."""
    backend = plan_request().backend
    return tuple(
        name
        for name in strategies_of(kind, gpus=gpus)
        if backend is None or backend in backends_of(kind, name, gpus=gpus)
    )


def choose_zero_backend(kind: ScriptKind, *, gpus: bool) -> words.Backend:
    """Return the backend with which a kind of script runs ZeRO stages: the requested one, else its first."""
    able = backends_of(kind, "zero2", gpus=gpus)
    return next((name for name in able if name == plan_request().backend), able[0])


def require_plan(kind: ScriptKind, plan: Plan, *, gpus: bool) -> None:
    """Refuse a plan that the library of the script cannot run.

    Raises:
        CannotRun: names what it can.
    """
    strategy, backend = plan.configuration.strategy, plan.configuration.backend
    require_possible(kind, strategy, gpus=gpus)
    _refuse_splits(kind, {name: getattr(plan.configuration, name) for name in words.DEGREES})
    if plan.configuration.is_uneven:
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} reads as many samples on every rank, and the plan has micro-batches of"
            f" {plan.configuration.micro_batches}; call dsplan.initialize in the script, or plan without node groups"
        )
    if backend not in (able := backends_of(kind, strategy, gpus=gpus)):
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} runs {strategy} {_where(gpus)} with backend {' or '.join(able)}, and the"
            f" plan names {backend}; make the plan with --backend {able[0]}"
        )


def require_possible(kind: ScriptKind, strategy: str | None, *, gpus: bool) -> None:
    """Refuse a strategy, and a backend, that the library of the script cannot run.

    Raises:
        CannotRun: names what it can.
    """
    _refuse_splits(kind, named(plan_request().degrees))
    if changes := _module_flags():
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} trains the modules that the script made, and {' '.join(changes)} changes"
            " them; call dsplan.initialize in the script, or make them so in it and leave the flag out"
        )
    if plan_request().rates is not None:
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} reads as many samples on every rank, and --rates gives the slower ones"
            " less; call dsplan.initialize in the script, or leave --rates out"
        )
    runnable, where = runnable_strategies(kind, gpus=gpus), _where(gpus)
    every = strategies_of(kind, gpus=gpus)
    who = _WHO.get(kind, "this script")
    if strategy is not None and strategy not in every:
        raise CannotRun(f"{who} cannot run {strategy} {where}; it can run {', '.join(every)}")
    if not runnable or (strategy is not None and strategy not in runnable):
        backends = sorted({name for each in every for name in backends_of(kind, each, gpus=gpus)})
        raise CannotRun(
            f"{who} cannot run {strategy or 'anything'} {where} with backend {plan_request().backend}; its backends"
            f" there: {', '.join(backends)}"
        )


def _refuse_splits(kind: ScriptKind, degrees: Mapping[str, Any]) -> None:
    """Refuse to leave a model whole that is to be split.

    Raises:
        CannotRun: the library of the script splits no model so.
    """
    sizes = {name: degrees.get(name, 1) for name in words.DEGREES}
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if split:
        # accelerate's ParallelismConfig wants models that from_pretrained has split, and GPUs (1.15, state.py).
        theirs = kind in _ON_ACCELERATE and degrees.get("pp", 1) * degrees.get("ep", 1) == 1
        launched = " (accelerate launch splits on GPUs: dsplan emit --format accelerate)" if theirs else ""
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} trains whole models here, and {split} splits them{launched}; call"
            " dsplan.initialize in the script, or leave that degree at 1"
        )


def _where(gpus: bool) -> str:
    return "on GPUs" if gpus else "without a GPU"


def refuse_unplanned_step() -> None:
    """Refuse a backward pass or an optimizer step that is about to be done without the plan that was asked for.

    Raises:
        CannotRun: names the script's line.
    """
    if claim.is_planned() or not (flags := requested_flags()):
        return
    changes_model = named(plan_request().degrees) or _module_flags()
    remedy = "call dsplan.initialize in the script" if changes_model else "wrap the model in DDP"
    raise CannotRun(
        f"{flags} cannot be applied: {own_line(traceback.extract_stack()) or 'the script'} trains with none of"
        f" {LIBRARIES}; {remedy}, or leave the option out"
    )


def refuse_unapplied() -> None:
    """Refuse the end of a script in which nothing has trained under the plan that was asked for.

    Raises:
        CannotRun: there was none.
    """
    if not claim.is_planned() and (flags := requested_flags()):
        raise CannotRun(f"{flags} was not applied: the script ended without training anything")
