"""Strategies by name, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from planner.cost.combinations import why_refused
from planner.types.plan import Configuration
from strategies.distributed.environment import Environment
from strategies.engine.base import Strategy
from strategies.errors import CannotRun, UnknownName

STRATEGIES: dict[str, str] = {
    "single": "strategies.backends.ddp:Single",
    "ddp": "strategies.backends.ddp:ReplicatedDataParallel",
    "fsdp": "strategies.backends.fsdp:FullShard",
    "fsdp-grad-op": "strategies.backends.fsdp:ShardGradOp",
    "hsdp": "strategies.backends.fsdp:HybridShard",
    "zero1": "strategies.backends.deepspeed.engine:DeepSpeedZero",
    "zero2": "strategies.backends.deepspeed.engine:DeepSpeedZero",
    "zero3": "strategies.backends.deepspeed.engine:DeepSpeedZero",
}
NATIVE: dict[str, str] = {
    "zero1": "strategies.backends.zero.stages:ZeroStage1",
    "zero2": "strategies.backends.zero.stages:ZeroStage2",
    "zero3": "strategies.backends.zero.stages:ZeroStage3",
}


def find_strategy(configuration: Configuration, environment: Environment) -> Strategy:
    """Make the strategy that runs a configuration.

    Raises:
        UnknownName: no strategy of that name; the message lists them.
        CannotRun: the configuration asks for what no strategy of this version does.
        BackendMissing: the strategy needs a library that is not installed.
    """
    name = configuration.strategy
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES, hint=f"choose one of {', '.join(STRATEGIES)}")
    if why := why_refused(configuration):
        raise CannotRun(f"the plan: {why}")
    paths = NATIVE if configuration.backend == "native" else STRATEGIES
    module, _, attribute = paths[name].partition(":")
    kind = cast("type[Strategy]", getattr(import_module(module), attribute))
    return kind(configuration, environment)
