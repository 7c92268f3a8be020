"""DeepSpeed scripts: the plan replaces batch triple, ZeRO and precision in the config; the rest stays the script's."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch

from planner import vocabulary as words
from planner.emit.common import EmitOptions
from planner.emit.deepspeed import deepspeed_config
from planner.types.plan import Plan
from strategies.backends.deepspeed.engine import require_precision
from strategies.config.read import read_object
from strategies.launch.hooks.patch import patch
from strategies.launch.hooks.script_plan import (
    LiveJob,
    load_given_plan,
    own_device,
    plan_live,
    say_replaced,
    sequence_length,
    watch,
)
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import example_batch

_FROM_PLAN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "bf16",
    "fp16",
    "torch_autocast",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)
_OPTIMIZERS: Mapping[str, words.Optimizer] = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion"}


def initialize(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    """Run `deepspeed.initialize` under the plan, which is made here unless there is one."""
    plan = load_given_plan("deepspeed")
    if not torch.cuda.is_available():
        # Its shared-memory collectives serve inference alone, and would be compiled for a minute before the first step.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    bound = inspect.signature(original).bind(*positional, **named)
    arguments = bound.arguments
    script_config = _script_config(arguments)
    deepspeed.init_distributed(dist_init_required=arguments.get("dist_init_required"))
    plan_in_use = plan or plan_live(_live_job(arguments, script_config))
    if plan_in_use is not None:
        _apply(plan_in_use, arguments, script_config)
    monitor = watch(plan_in_use, planned=plan is None, device=own_device())
    engine, *others = original(*bound.args, **bound.kwargs)
    monitor.training_starts()
    _watch_engine(engine, monitor)
    return (engine, *others)


def _apply(plan: Plan, arguments: dict[str, Any], script_config: Mapping[str, Any]) -> None:
    """Put the plan into the script's config among the arguments of `initialize`."""
    if plan.configuration.backend == "deepspeed":
        require_precision(plan.configuration.precision)
    arguments["config"] = merged_config(script_config, plan)
    arguments["config_params"] = None
    arguments["args"] = _without_config(arguments.get("args"))
    say_replaced(script_config, {name: arguments["config"].get(name) for name in _FROM_PLAN})


def merged_config(script_config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the script's config with what the plan decides in the place of what the script wrote."""
    planned = deepspeed_config(plan, EmitOptions(cpu=not torch.cuda.is_available()))
    kept = {name: value for name, value in script_config.items() if name not in _FROM_PLAN}
    return {**kept, **{name: planned[name] for name in _FROM_PLAN if name in planned}}


def _script_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's config: a dictionary or a file, by `config`, `config_params` or `--deepspeed_config`.

    Raises:
        BrokenFile: the file cannot be read or is not JSON with an object at the top.
    """
    given = arguments.get("config") or arguments.get("config_params")
    given = given or getattr(arguments.get("args"), "deepspeed_config", None)
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    return read_object(Path(str(given)))


def _without_config(args: Any) -> Any:
    """Return the script's parsed arguments without the file that `config` now replaces."""
    return argparse.Namespace(**{**vars(args), "deepspeed_config": None}) if hasattr(args, "deepspeed_config") else args


def _live_job(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> LiveJob:
    world = int(os.environ["WORLD_SIZE"])
    accumulation = _number(config, "gradient_accumulation_steps")
    micro_batch = _number(config, "train_micro_batch_size_per_gpu")
    total = _number(config, "train_batch_size")
    if micro_batch is None:
        micro_batch = max(1, (total or world) // world // (accumulation or 1))
    if accumulation is None:
        accumulation = max(1, (total or micro_batch * world) // (micro_batch * world))
    optimizer = str(config.get("optimizer", {}).get("type", "AdamW")).lower()
    data = arguments.get("training_data")
    return LiveJob(
        module=arguments["model"],
        kind="deepspeed",
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        sequence_length=sequence_length(data, arguments.get("collate_fn")),
        example=example_batch(data, arguments.get("collate_fn")),
        precision="bf16" if _enabled(config, "bf16") else "fp16" if _enabled(config, "fp16") else "fp32",
        optimizer=_OPTIMIZERS.get(optimizer, "adamw"),
        # A loader that the script makes itself keeps its batch size whatever the config says.
        fixed_batch=data is None,
    )


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    return bool(config.get(section, {}).get("enabled"))


def _watch_engine(engine: Any, monitor: RunMonitor) -> None:
    """Notify the monitor of the engine's forward, backward and step calls."""
    backward, step = engine.backward, engine.step

    def noted_backward(loss: torch.Tensor, *rest: Any, **named: Any) -> Any:
        monitor.loss_is(loss)
        return backward(loss, *rest, **named)

    def noted_step(*rest: Any, **named: Any) -> Any:
        acts = engine.is_gradient_accumulation_boundary()
        result = step(*rest, **named)
        if acts:
            monitor.step_ended(engine.global_steps)
        return result

    def noted_forward(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        if engine.training:
            monitor.forward_starts(engine.module, (positional, named))

    engine.register_forward_pre_hook(noted_forward, with_kwargs=True)
    patch(engine, "backward", noted_backward)
    patch(engine, "step", noted_step)
