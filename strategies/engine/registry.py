"""Strategies by name, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from planner.cost.combinations import refusal
from planner.search.estimate import offloads_of
from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES
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
    """The strategy that runs a configuration.

    Raises:
        UnknownName: no strategy of that name; the message lists them.
        CannotRun: the configuration asks for what no strategy of this version does.
        BackendMissing: the strategy needs a library that is not installed.
    """
    name = configuration.strategy
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES, hint=f"choose one of {', '.join(STRATEGIES)}")
    _refuse_what_cannot_run(configuration)
    places = NATIVE if configuration.backend == "native" else STRATEGIES
    module, _, attribute = places[name].partition(":")
    kind = cast("type[Strategy]", getattr(import_module(module), attribute))
    return kind(configuration, environment)


def _refuse_what_cannot_run(configuration: Configuration) -> None:
    if why := refusal(configuration):
        raise CannotRun(f"the plan: {why}")
    backends = ("deepspeed", "native") if configuration.zero_stage else ("torch",)
    if configuration.backend not in backends:
        raise CannotRun(
            f"backend {configuration.backend!r} does not run strategy {configuration.strategy!r}; use"
            f" {' or '.join(map(repr, backends))}"
        )
    if configuration.optimizer == "adafactor" and configuration.strategy in FSDP_STRATEGIES:
        raise CannotRun(
            f"optimizer 'adafactor' needs whole matrices and strategy {configuration.strategy!r} splits them; use ddp,"
            " zero1 to zero3 with backend 'native', or optimizer 'adamw'"
        )
    possible = ("none", *offloads_of(configuration.strategy, configuration.backend))
    if configuration.offload not in possible:
        raise CannotRun(
            f"strategy {configuration.strategy!r} cannot offload {configuration.offload!r}; it can offload"
            f" {', '.join(possible)}"
        )
