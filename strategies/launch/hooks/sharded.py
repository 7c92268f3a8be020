"""accelerate, and HF Trainer with it, where dsplan's own wrapper shards the model in the place of accelerate's DDP.

accelerate 1.15 shards on accelerators alone: ranks without one are MULTI_CPU, for which `AcceleratorState` makes no
FSDP, and under its DeepSpeed each of them is a world of its own (`PartialState` counts one process). There, and with
our own ZeRO on any device, accelerate is set up for DDP, and `ScriptParallel` is what its `prepare_model` wraps with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from planner import vocabulary as words
from planner.types.plan import Configuration, Plan
from strategies.errors import CannotRun
from strategies.integrations.ddp_script import ScriptParallel
from strategies.launch.hooks.patch import patch
from strategies.tracing.step import checkpointing


def is_own(plan: Plan) -> bool:
    """Return whether the plan's strategy is dsplan's own work under accelerate."""
    configuration = plan.configuration
    if configuration.strategy in words.ZERO_STAGES:
        return configuration.backend == "native"
    return configuration.strategy in words.FSDP_STRATEGIES and not torch.cuda.is_available()


def library_plan(plan: Plan) -> Plan:
    """Return what accelerate is set up for: the plan itself, or DDP where the strategy is dsplan's own work.

    Raises:
        CannotRun: the plan offloads, which no script's own optimizer steps through.
    """
    if not is_own(plan):
        return plan
    configuration = plan.configuration
    if configuration.offload != "none":
        raise CannotRun(
            f"accelerate steps on the device, so {configuration.strategy} of dsplan's own cannot offload"
            f" {configuration.offload} under it; plan without offload"
        )
    ranks = configuration.world_size
    ddp = replace(configuration, strategy="ddp", backend="torch", dp_replicate=ranks, dp_shard=1)
    return replace(plan, configuration=ddp)


def shard_models(accelerator: Any, plan: Plan) -> None:
    """Have an accelerator wrap the models that it prepares for training in the plan's strategy."""
    if not is_own(plan):
        return
    prepare_model = accelerator.prepare_model

    @functools.wraps(prepare_model)
    def prepare_sharded(*positional: Any, **named: Any) -> Any:
        with _wrapping(plan.configuration):
            return prepare_model(*positional, **named)

    patch(accelerator, "prepare_model", prepare_sharded)


def apply_checkpointing(model: torch.nn.Module, plan: Plan) -> None:
    """Recompute activations as the plan says, where no setting of accelerate's does it: it has one for its own FSDP."""
    level = plan.configuration.activation_checkpointing
    if level != "none" and library_plan(plan).configuration.strategy not in words.FSDP_STRATEGIES:
        checkpointing.checkpoint_activations(model, level, every=plan.configuration.checkpoint_every)


@contextmanager
def _wrapping(configuration: Configuration) -> Iterator[None]:
    """Have `torch.nn.parallel.DistributedDataParallel`, as accelerate looks it up, shard."""
    wrapper = type("ScriptParallel", (ScriptParallel,), {"configuration": configuration})
    original = torch.nn.parallel.DistributedDataParallel
    namespace: Any = torch.nn.parallel
    namespace.DistributedDataParallel = wrapper
    try:
        yield
    finally:
        namespace.DistributedDataParallel = original


def save_from_all_ranks(trainer: Any, plan: Plan) -> None:
    """Have a Trainer take its model's and its optimizer's states on every rank, since each has a part of them.

    Trainer saves what its DDP has on the writing rank alone.
    """
    if not is_own(plan):
        return
    for name, holder in (("save_model", "model"), ("_save_optimizer_and_scheduler", "optimizer")):
        patch(trainer, name, _with_states(getattr(trainer, name), trainer, holder))


def _with_states(save: Callable[..., Any], trainer: Any, holder: str) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_whole(*positional: Any, **named: Any) -> Any:
        owner = getattr(trainer, holder)
        if owner is None:
            return save(*positional, **named)
        state, own = owner.state_dict(), vars(owner).get("state_dict")
        owner.state_dict = lambda *_, **__: state
        try:
            return save(*positional, **named)
        finally:
            del owner.state_dict
            if own is not None:
                owner.state_dict = own

    return save_whole
