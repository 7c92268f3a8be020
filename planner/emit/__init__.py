"""Plan -> the config files of the tools that run it; each format is a module with `emit(plan, options)`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from planner import vocabulary as words
from planner.emit.common import DEFAULTS, FINETUNERS, TRAINERS, EmitOptions, refuse, script_duties
from planner.errors import UnknownName
from planner.types.plan import Plan

__all__ = ["FORMATS", "EmitOptions", "emit", "fitting_formats", "script_duties"]

FORMATS: dict[str, str] = {
    "deepspeed": "planner.emit.deepspeed:emit",
    "accelerate": "planner.emit.accelerate:emit",
    "huggingface": "planner.emit.huggingface:emit",
    "torchrun": "planner.emit.launchers:torchrun",
    "slurm": "planner.emit.launchers:slurm",
    "mpi": "planner.emit.launchers:mpi",
    "kubernetes": "planner.emit.kubernetes:emit",
    "skypilot": "planner.emit.clouds:skypilot",
    "dstack": "planner.emit.clouds:dstack",
    "torchtitan": "planner.emit.torchtitan:emit",
    "megatron": "planner.emit.megatron:emit",
    "megatron-bridge": "planner.emit.megatron:emit_bridge",
    "nemo": "planner.emit.megatron:emit_nemo",
    "nanotron": "planner.emit.nanotron:emit",
    "axolotl": "planner.emit.finetuning:axolotl",
    "llama-factory": "planner.emit.finetuning:llama_factory",
    "ms-swift": "planner.emit.finetuning:ms_swift",
    "trl": "planner.emit.finetuning:trl",
    "torchtune": "planner.emit.finetuning:torchtune",
    "verl": "planner.emit.post_training:verl",
    "openrlhf": "planner.emit.post_training:openrlhf",
    "nemo-rl": "planner.emit.post_training:nemo_rl",
}

_LAUNCHERS = ("torchrun", "slurm", "mpi", "kubernetes", "skypilot", "dstack")
"""Formats that start a script, whose ranks take their shares from the plan."""
_NAMES_LAYERS = ("torchtitan", "megatron", "megatron-bridge", "nemo")
"""Formats of trainers that are told which layers a stage has."""
_Emitter = Callable[[Plan, EmitOptions], dict[str, str]]


def emit(plan: Plan, format: str, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """Return the files of one format, `{filename: text}`; the file to look at first comes first.

    Raises:
        UnknownName: the format is not in FORMATS; the message lists them.
        ContradictoryRequest: the format has no form of this plan.
    """
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS, hint=f"choose one of {', '.join(FORMATS)}")
    if plan.configuration.is_uneven and format not in _LAUNCHERS:
        shares = f"with micro-batches of {plan.configuration.micro_batches}"
        raise refuse(plan, format, shares, "only `dsplan run` gives ranks unlike shares; emit its launcher")
    if plan.configuration.layers_per_stage and format not in (*_LAUNCHERS, *_NAMES_LAYERS):
        stages = f"whose stages have {plan.configuration.layers_per_stage} layers"
        raise refuse(plan, format, stages, f"`dsplan run` trains it, or emit {' or '.join(_NAMES_LAYERS)}")
    module, _, function = FORMATS[format].partition(":")
    return cast("_Emitter", getattr(import_module(module), function))(plan, options)


_CODE_FORMATS = {
    "torchtitan": ("torchtitan",),
    "megatron": ("megatron", "megatron-bridge"),
    "nemo": ("nemo", "megatron-bridge"),
    "nanotron": ("nanotron",),
}
"""Formats of the trainers whose modules a plan's `code` can name."""


def fitting_formats(plan: Plan) -> tuple[str, ...]:
    """Return the formats to write a recommended plan in: its own trainer's.

    Where none is named they are the others, and the trainers' too for a plan that `dsplan run` cannot run; of
    post-training those of its trainers as well. A format may still have no form of the plan.
    """
    code = plan.workload.get("code")
    if code in _CODE_FORMATS:
        return _CODE_FORMATS[code]
    needs_trainer = plan.configuration.splits_model or not plan.runnable
    left_out = {*(() if needs_trainer else TRAINERS)}
    left_out |= {*(() if plan.workload.get("task") in words.POST_TRAINING else FINETUNERS)}
    return tuple(name for name in FORMATS if name not in left_out)
