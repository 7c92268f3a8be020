"""What was asked of `dsplan run`, `--strategy`, `--backend` or `--plan`, and whether what trains here can do it. No
torch is imported for it: this is asked before a script has loaded any."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from typing import Any

from planner import vocabulary as words
from planner.types.plan import Plan
from strategies.errors import CannotRun
from strategies.run_directory import claim
from strategies.run_directory.spec import ScriptKind
from strategies.supervision.failures import own_line
from strategies.variables import BACKEND, KERNELS, METHOD, PARALLEL, PLAN, STRATEGY

_WHO: Mapping[ScriptKind, str] = {
    "huggingface": "HF Trainer",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
}
_ON_ACCELERATE = ("huggingface", "accelerate")
_FLAGS = {STRATEGY: "--strategy", BACKEND: "--backend", PLAN: "--plan"}
LIBRARIES = "dsplan, HF Trainer, accelerate, DeepSpeed, Lightning, DDP and FSDP"

# deepspeed.initialize knows data parallelism (stage 0) and its own ZeRO.
_DEEPSPEED: tuple[words.Strategy, ...] = ("single", "ddp", "zero1", "zero2", "zero3")


def asked() -> str:
    """What was asked for, as it stood on the command line; empty where everything was left open."""
    named = [f"{flag} {os.environ[name]}" for name, flag in _FLAGS.items() if os.environ.get(name)]
    return " ".join([*named, *_spelled(_handed(PARALLEL)), *_changes()])


def _handed(variable: str) -> Mapping[str, Any]:
    """The flags that a variable holds, as they were asked for: degrees, what is trained, or kernels."""
    handed = os.environ.get(variable)
    return json.loads(handed) if handed else {}


def _spelled(flags: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]


def _changes() -> list[str]:
    """The flags that change a model's modules."""
    kernels = [name if kernel == "all" else f"{kernel}={name}" for kernel, name in _handed(KERNELS).items()]
    return [*_spelled(_handed(METHOD)), *([f"--kernels {','.join(kernels)}"] if kernels else [])]


def accepted(kind: ScriptKind, *, gpus: bool) -> tuple[words.Strategy, ...]:
    """The strategies that a kind of script can run, on GPUs or on CPU ranks."""
    if kind == "huggingface" and gpus:
        # TrainingArguments takes hsdp as an object only, which no file of a plan can hold.
        return tuple(name for name in words.STRATEGIES if name != "hsdp")
    return _DEEPSPEED if kind == "deepspeed" else words.STRATEGIES


def backends(kind: ScriptKind, strategy: words.Strategy, *, gpus: bool) -> tuple[words.Backend, ...]:
    """The backends with which a kind of script can run a strategy, the one to take first."""
    if kind == "deepspeed":
        return ("deepspeed",)
    if kind == "torch":
        return ("native" if strategy in words.ZERO_STAGES else "torch",)
    if kind in _ON_ACCELERATE and strategy in words.ZERO_STAGES and not gpus:
        # accelerate 1.15 takes CPU ranks under DeepSpeed for worlds of their own (strategies/launch/hooks/sharded.py).
        return ("native",)
    return words.backends_of(strategy)


def possible(kind: ScriptKind, *, gpus: bool) -> tuple[words.Strategy, ...]:
    """The strategies that a kind of script can run with the backend that was asked for."""
    backend = os.environ.get(BACKEND)
    found = accepted(kind, gpus=gpus)
    return tuple(name for name in found if backend is None or backend in backends(kind, name, gpus=gpus))


def zero_backend(kind: ScriptKind, *, gpus: bool) -> words.Backend:
    """The backend with which a kind of script runs ZeRO stages: the one that was asked for, else its first."""
    able = backends(kind, "zero2", gpus=gpus)
    return next((name for name in able if name == os.environ.get(BACKEND)), able[0])


def require_plan(kind: ScriptKind, plan: Plan, *, gpus: bool) -> None:
    """Refuse a plan that the library of the script cannot run.

    Raises:
        CannotRun: names what it can.
    """
    strategy, backend = plan.configuration.strategy, plan.configuration.backend
    require_possible(kind, strategy, gpus=gpus)
    _refuse_splits(kind, {name: getattr(plan.configuration, name) for name in words.DEGREES})
    if backend not in (able := backends(kind, strategy, gpus=gpus)):
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} runs {strategy} {_where(gpus)} with backend {' or '.join(able)}, and the"
            f" plan names {backend}; make the plan with --backend {able[0]}"
        )


def require_possible(kind: ScriptKind, strategy: str | None, *, gpus: bool) -> None:
    """Refuse a strategy, and a backend, that the library of the script cannot run.

    Raises:
        CannotRun: names what it can.
    """
    _refuse_splits(kind, _handed(PARALLEL))
    if changes := _changes():
        raise CannotRun(
            f"{_WHO.get(kind, 'this script')} trains the modules that the script made, and {' '.join(changes)} changes"
            " them; call dsplan.initialize in the script, or make them so in it and leave the flag out"
        )
    can, where = possible(kind, gpus=gpus), _where(gpus)
    every = accepted(kind, gpus=gpus)
    who = _WHO.get(kind, "this script")
    if strategy is not None and strategy not in every:
        raise CannotRun(f"{who} cannot run {strategy} {where}; it can run {', '.join(every)}")
    if not can or (strategy is not None and strategy not in can):
        known = sorted({name for each in every for name in backends(kind, each, gpus=gpus)})
        raise CannotRun(
            f"{who} cannot run {strategy or 'anything'} {where} with backend {os.environ.get(BACKEND)}; its backends"
            f" there: {', '.join(known)}"
        )


def _refuse_splits(kind: ScriptKind, degrees: Mapping[str, Any]) -> None:
    """Refuse to leave a model whole that is to be split.

    Raises:
        CannotRun: the library of the script splits no model so.
    """
    asked = {name: degrees.get(name, 1) for name in words.DEGREES}
    split = " x ".join(f"{name} {size}" for name, size in asked.items() if size > 1)
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
    if claim.is_planned() or not asked():
        return
    changes_model = _handed(PARALLEL) or _changes()
    remedy = "call dsplan.initialize in the script" if changes_model else "wrap the model in DDP"
    raise CannotRun(
        f"{asked()} cannot be applied: {own_line(traceback.extract_stack()) or 'the script'} trains with none of"
        f" {LIBRARIES}; {remedy}, or leave the option out"
    )


def refuse_unapplied() -> None:
    """Refuse the end of a script in which nothing has trained under the plan that was asked for.

    Raises:
        CannotRun: there was none.
    """
    if not claim.is_planned() and asked():
        raise CannotRun(f"{asked()} was not applied: the script ended without training anything")
