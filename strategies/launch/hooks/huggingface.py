"""HF Trainer scripts: the plan becomes TrainingArguments, the steps become metrics.

TrainingArguments is a dataclass whose settings take effect in `__post_init__`. A plan file fills them in there, before
they do. Without one the model is first known in `Trainer.__init__`: the arguments then go back to what the script
wrote, the plan made from the model is filled in, and `__post_init__` runs once more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from planner import vocabulary as words
from planner.emit.common import EmitOptions
from planner.emit.huggingface import training_arguments
from planner.plan import Plan
from strategies.launch.hooks.huggingface_supervised import supervise
from strategies.launch.hooks.live import LiveJob, plan_live, sequence_length, settled_plan, watch
from strategies.launch.hooks.patch import patch
from strategies.launch.hooks.say import say_replaced
from strategies.launch.spec import LaunchSpec
from strategies.monitor import RunMonitor

# The script's own: what it optimizes with, and how fast.
_LEFT_TO_SCRIPT = frozenset({"optim", "learning_rate", "weight_decay", "max_grad_norm"})
# Follows from the machine, not from the plan.
_MACHINE = frozenset({"use_cpu", "ddp_backend"})
_WRITTEN = "_dsplan_written"

_OPTIMIZERS: Mapping[str, words.Optimizer] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
}


def install(spec: LaunchSpec) -> None:
    """Patch TrainingArguments and Trainer of this process."""
    plan = settled_plan()
    settle = TrainingArguments.__post_init__
    start = Trainer.__init__

    @functools.wraps(settle)
    def post_init(self: Any) -> None:
        setattr(self, _WRITTEN, _written(self))
        if plan is not None:
            _fill_in(self, plan)
        settle(self)

    @functools.wraps(start)
    def init(self: Any, *positional: Any, **named: Any) -> None:
        bound = inspect.signature(start).bind(self, *positional, **named)
        arguments = bound.arguments
        arguments["args"] = settings = arguments.get("args") or TrainingArguments(output_dir="tmp_trainer")
        made = plan or plan_live(_live_job(arguments, settings, spec))
        if plan is None:
            _return_to(settings, getattr(settings, _WRITTEN))
            _fill_in(settings, made)
            settle(settings)
        monitor = watch(made, planned=plan is None, device=settings.device)
        arguments["callbacks"] = [*(arguments.get("callbacks") or ()), _StepEnd(monitor)]
        start(*bound.args, **bound.kwargs)
        _watch_training_steps(self, monitor, supervise(self, made))

    patch(TrainingArguments, "__post_init__", post_init)
    patch(Trainer, "__init__", init)


def _live_job(arguments: Mapping[str, Any], settings: Any, spec: LaunchSpec) -> LiveJob:
    model = arguments.get("model")
    if model is None and arguments.get("model_init") is not None:
        model = arguments["model_init"]()
    data = arguments.get("train_dataset")
    collate = arguments.get("data_collator")
    return LiveJob(
        module=cast("torch.nn.Module", model),
        kind=spec.kind,
        micro_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        sequence_length=sequence_length(data, collate),
        precision="bf16" if settings.bf16 else "fp16" if settings.fp16 else "fp32",
        optimizer=_OPTIMIZERS.get(str(settings.optim.value), "adamw"),
    )


def _written(settings: Any) -> dict[str, Any]:
    """The settings as the script wrote them; dictionaries are copied, because `__post_init__` edits them."""
    written = {item.name: getattr(settings, item.name) for item in fields(settings) if item.init}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in written.items()}


def _return_to(settings: Any, written: Mapping[str, Any]) -> None:
    # Device and rank are cached on the arguments at their first use.
    vars(settings).pop("_setup_devices", None)
    for name, value in written.items():
        setattr(settings, name, dict(value) if isinstance(value, dict) else value)


def _fill_in(settings: Any, plan: Plan) -> None:
    options = EmitOptions(
        gradient_clipping=settings.max_grad_norm,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        cpu=not torch.cuda.is_available(),
    )
    known = {item.name for item in fields(settings)}
    wanted: dict[str, Any] = {"deepspeed": None, "fsdp": None, "fsdp_config": None}
    wanted |= {name: value for name, value in training_arguments(plan, options).items() if name not in _LEFT_TO_SCRIPT}
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        if new in known and old in wanted:
            wanted[new] = wanted.pop(old)
            setattr(settings, old, None)
    chosen = {name: value for name, value in wanted.items() if name not in _MACHINE}
    say_replaced({name: getattr(settings, name) for name in chosen}, chosen)
    for name, value in wanted.items():
        setattr(settings, name, value)


class _StepEnd(TrainerCallback):  # type: ignore[misc]
    """Tells the monitor when an optimizer step is over and when training is."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.step_ended(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.close()


def _watch_training_steps(trainer: Any, monitor: RunMonitor, loss_is: Callable[[Any], object]) -> None:
    """Tell the monitor of every micro-batch and its loss."""
    original = trainer.training_step

    @functools.wraps(original)
    def training_step(model: Any, inputs: Any, *rest: Any, **named: Any) -> torch.Tensor:
        monitor.forward_starts(model, ((), inputs))
        loss: torch.Tensor = original(model, inputs, *rest, **named)
        # Trainer divides by the accumulation steps; the monitor takes the mean of whole losses.
        monitor.loss_is(loss * trainer.args.gradient_accumulation_steps)
        loss_is(loss)
        return loss

    patch(trainer, "training_step", training_step)
