"""accelerate scripts: the plan becomes the environment that `accelerate launch` would have set.

Without a plan file the model is first known in `Accelerator.prepare`. The accelerator is then made anew, in place and
with the arguments the script gave, under that environment; ranks and process group stay as they are.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from torch.utils.data import DataLoader

from planner import vocabulary as words
from planner.emit.accelerate import emit
from planner.emit.common import EmitOptions, recomputing_whole_blocks
from planner.types.plan import Plan
from strategies.launch.hooks.patch import patch, with_batch_size
from strategies.launch.hooks.script_plan import (
    LiveJob,
    load_given_plan,
    plan_live,
    say,
    say_replaced,
    sequence_length,
    watch,
)
from strategies.launch.hooks.sharded import apply_checkpointing, library_plan, shard_models
from strategies.run_directory import claim
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import example_batch
from strategies.variables import RUN_DIRECTORY

# Arguments of Accelerator that would win over the environment.
_FROM_PLAN = (
    "mixed_precision",
    "gradient_accumulation_steps",
    "gradient_accumulation_plugin",
    "fsdp_plugin",
    "deepspeed_plugin",
    "deepspeed_plugins",
    "parallelism_config",
)
_DEFAULTS = {"gradient_accumulation_steps": 1}
"""What Accelerator does where the script says nothing, by accelerate's signature."""
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_GIVEN = "_dsplan_given"


_START = "_dsplan_start"


def init(original: Callable[..., None], accelerator: Any, *positional: Any, **named: Any) -> None:
    """Run `Accelerator.__init__`, under the plan where there is one already.

    It claims nothing yet: a script may have an accelerator for its rank or its prints alone, and train with something
    else.
    """
    plan = load_given_plan("accelerate")
    given = inspect.signature(original).bind(accelerator, *positional, **named).arguments
    given.pop("self")
    setattr(accelerator, _GIVEN, given)
    setattr(accelerator, _START, original)
    if plan is None:
        original(accelerator, **_with_both_backends(given))
    else:
        _start_under(plan, accelerator)


def _with_both_backends(given: dict[str, Any]) -> dict[str, Any]:
    """Have the process group reduce tensors on the CPU too: the plan is made later, and it may offload."""
    handlers = given.get("kwargs_handlers") or []
    has_own = any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers)
    if has_own or given.get("cpu") or not torch.cuda.is_available():
        return given
    return {**given, "kwargs_handlers": [*handlers, InitProcessGroupKwargs(backend=words.GROUP_BACKENDS)]}


def prepare(original: Callable[..., Any], accelerator: Any, *objects: Any, **named: Any) -> Any:
    """Run `Accelerator.prepare` under the plan, which is made here from the first model unless there is one."""
    model = next((item for item in objects if isinstance(item, torch.nn.Module)), None)
    if model is None or hasattr(accelerator, "_dsplan_monitor") or not hasattr(accelerator, _GIVEN):
        return original(accelerator, *objects, **named)
    with claim.use("accelerate"):
        plan = load_given_plan("accelerate")
        accumulates = _accumulates(sys._getframe(1))
        plan_in_use = plan or plan_live(_live_job(accelerator, objects, accumulates=accumulates))
        if plan is None and plan_in_use is not None:
            _start_under(plan_in_use, accelerator)
        batched = [_batched(item, plan_in_use, accumulates=accumulates) for item in objects] if plan_in_use else objects
        if plan_in_use is not None:
            shard_models(accelerator, plan_in_use)
            apply_checkpointing(model, plan_in_use)
        accelerator._dsplan_monitor = watch(plan_in_use, planned=plan is None, device=accelerator.device)
        result = original(accelerator, *batched, **named)
        accelerator._dsplan_monitor.training_starts()
        _watch(accelerator, result if isinstance(result, (tuple, list)) else (result,), accelerator._dsplan_monitor)
        return result


def launch_environment(plan: Plan, directory: Path) -> dict[str, str]:
    """Return what `accelerate launch` sets for this plan, by accelerate's own functions from the emitted config."""
    options = EmitOptions(cpu=not torch.cuda.is_available())
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in emit(recomputing_whole_blocks(library_plan(plan)), options).items():
        (directory / name).write_text(text)
    return _environment(["--config_file", str(directory / "accelerate.yaml")], directory)


def launcher_environment(flags: Sequence[str]) -> dict[str, str]:
    """Return what `accelerate launch` sets for these flags of its own; the device stays the one that was decided."""
    logger = logging.getLogger("accelerate.commands.launch")
    level = logger.level
    logger.setLevel(logging.ERROR)  # which defaults it takes was told to nobody who can answer
    try:
        environment = _environment(flags, Path())
    finally:
        logger.setLevel(level)
    if environment.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true"):
        environment.pop("ACCELERATE_USE_CPU", None)
    return environment


def _environment(flags: Sequence[str], directory: Path) -> dict[str, str]:
    """Return accelerate's variables by its own functions; `directory` holds the DeepSpeed config that it names."""
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "script.py"]))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(getattr(defaults, "deepspeed_config", None) or ())
        if arguments.deepspeed_config_file:
            arguments.deepspeed_config_file = str(directory / arguments.deepspeed_config_file)
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}


def _start_under(plan: Plan, accelerator: Any) -> None:
    """Make `accelerator`, or make it anew, in place and under the plan."""
    given: dict[str, Any] = getattr(accelerator, _GIVEN)
    configuration = plan.configuration
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_DEEPSPEED", "ACCELERATE_USE_"))]:
        del os.environ[name]
    os.environ.update(launch_environment(plan, Path(os.environ[RUN_DIRECTORY], f"accelerate-rank{os.environ['RANK']}")))
    os.environ["ACCELERATE_USE_CPU"] = str(not torch.cuda.is_available())
    steps = configuration.gradient_accumulation_steps
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    kept = {name: value for name, value in given.items() if name not in _FROM_PLAN}
    planned: dict[str, Any] = {"gradient_accumulation_steps": steps}
    planned["mixed_precision"] = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    say_replaced(scripts_settings(given), planned)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    getattr(accelerator, _START)(accelerator, **kept)
    setattr(accelerator, _GIVEN, given)


def scripts_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Accelerator that a plan replaces, as the script leaves them."""
    return {**_DEFAULTS, **{name: value for name, value in given.items() if name in _FROM_PLAN}}


def _live_job(accelerator: Any, objects: tuple[Any, ...], *, accumulates: bool) -> LiveJob:
    loader = _training_loader(objects)
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    precision = str(accelerator.mixed_precision)
    optimizer = next((item for item in objects if isinstance(item, torch.optim.Optimizer)), None)
    return LiveJob(
        module=next(item for item in objects if isinstance(item, torch.nn.Module)),
        kind="accelerate",
        micro_batch_size=getattr(loader, "batch_size", None) or 1,
        gradient_accumulation_steps=accelerator.gradient_accumulation_steps,
        sequence_length=sequence_length(data, collate),
        example=example_batch(data, collate),
        # All but its products is bf16 under fp8.
        precision={"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(precision, "fp32"),  # type: ignore[arg-type]
        optimizer=_optimizer_name(optimizer),
        # Without `accumulate` in the script nothing would accumulate, and an unusual loader cannot be cut anew.
        accumulates=accumulates,
        fixed_batch=not accumulates or loader is None or with_batch_size(loader, 1) is None,
    )


def _accumulates(frame: FrameType | None) -> bool:
    """Return whether the code that is on its way to `prepare`, or beside it in its modules, names `accumulate`.

    What a loop will call cannot be seen before it runs, and by then the batches are cut. The one file that was started
    says nothing: the loop may be in a module that it imports. So the loaded code of every module on the stack is asked,
    function by function, whichever of them will be called.
    """
    seen: set[int] = set()
    while frame is not None:
        module = frame.f_globals
        if id(module) not in seen and str(module.get("__name__")).partition(".")[0] not in ("accelerate", "strategies"):
            seen.add(id(module))
            if any("accumulate" in code.co_names for code in _codes(frame.f_code, module)):
                return True
        frame = frame.f_back
    return False


def _codes(running: CodeType, module: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the running code, that of the module's functions and methods, and all defined inside any of them."""
    owners = [value for value in module.values() if getattr(value, "__module__", None) == module.get("__name__")]
    members = [member for owner in owners if isinstance(owner, type) for member in vars(owner).values()]
    functions = (getattr(item, "__func__", item) for item in (*owners, *members))
    waiting = [running, *(code for item in functions if isinstance(code := getattr(item, "__code__", None), CodeType))]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _optimizer_name(optimizer: torch.optim.Optimizer | None) -> words.Optimizer:
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    if isinstance(optimizer, torch.optim.Adafactor):
        return "adafactor"
    fused = optimizer is not None and optimizer.defaults.get("fused")
    return "adamw-fused" if fused else "adamw"


def _training_loader(objects: tuple[Any, ...]) -> DataLoader[Any] | None:
    """Return the first loader handed to `prepare`, which by custom is the training data."""
    return next((item for item in objects if isinstance(item, DataLoader)), None)


def _batched(item: Any, plan: Plan, *, accumulates: bool) -> Any:
    """Return a loader cut into the plan's micro-batches; anything else as it is."""
    size = plan.configuration.micro_batch_size
    if not isinstance(item, DataLoader) or item.batch_size in (size, None) or not accumulates:
        return item
    cut = with_batch_size(item, size)
    if cut is None:
        say(f"a data loader with a batch sampler of its own keeps its batches; the plan counts {size} samples")
        return item
    say_replaced({"batch_size": item.batch_size}, {"batch_size": size})
    return cut


def _watch(accelerator: Any, prepared: Sequence[Any], monitor: RunMonitor) -> None:
    """Notify the monitor of forward passes, losses and optimizer steps."""
    backward = accelerator.backward

    def noted_backward(loss: torch.Tensor, **named: Any) -> None:
        monitor.loss_is(loss)
        backward(loss, **named)
        if accelerator.distributed_type == "DEEPSPEED" and accelerator.sync_gradients:
            # DeepSpeed's engine steps inside accelerate's backward.
            monitor.step_ended()

    def noted_forward(module: torch.nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if module.training:
            monitor.forward_starts(module, (positional, named))

    patch(accelerator, "backward", noted_backward)
    for item in prepared:
        if isinstance(item, torch.nn.Module):
            item.register_forward_pre_hook(noted_forward, with_kwargs=True)
        elif isinstance(item, AcceleratedOptimizer) and accelerator.distributed_type != "DEEPSPEED":
            _watch_optimizer(accelerator, item, monitor)


def _watch_optimizer(accelerator: Any, optimizer: Any, monitor: RunMonitor) -> None:
    step = optimizer.step

    def noted_step(*positional: Any, **named: Any) -> Any:
        result = step(*positional, **named)
        if accelerator.sync_gradients:
            monitor.step_ended()
        return result

    patch(optimizer, "step", noted_step)
