"""Optimizers and schedulers that a config names, made for whichever strategy runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.plan import Configuration
from strategies.config import NamedParts
from strategies.errors import BackendMissing, CannotRun
from strategies.muon import muon_groups
from strategies.names import DEEPSPEEDS_OWN, MADE_BY_DEEPSPEED_ON_CPU, plain
from strategies.protocols import OptimizerFactory, SchedulerFactory, TrainingParts
from strategies.registered import OF_OPTIMIZERS, OF_SCHEDULERS, Registry, check_params, require_numbers

Made = TypeVar("Made")


def with_named(parts: TrainingParts) -> TrainingParts:
    """The parts with the optimizer and scheduler that the config names, where the script brings none itself.

    Raises:
        CannotRun: a name or an argument is not known, or a number is written as a text.
        BackendMissing: the optimizer's library is not installed.
    """
    optimizer, scheduler = parts.script.optimizer, parts.script.scheduler
    for registry, asked in ((OF_OPTIMIZERS, optimizer), (OF_SCHEDULERS, scheduler)):
        if asked is not None and registry.own(asked.name) is None:
            require_numbers(registry.word, asked)
    if scheduler is not None and parts.lr_scheduler is None:
        parts = replace(parts, lr_scheduler=scheduler_by_name(scheduler))
    if optimizer is None or parts.optimizer is not None or made_by_deepspeed(optimizer, parts.plan.configuration):
        return parts
    if plain(optimizer.name) == "muon":
        parts = replace(parts, model_parameters=muon_groups(parts.model, parts.model_parameters))
    return replace(parts, optimizer=optimizer_by_name(optimizer))


def made_by_deepspeed(asked: NamedParts, configuration: Configuration) -> bool:
    """Whether DeepSpeed makes an optimizer from the config, as it must its own classes and those for the CPU.

    Raises:
        CannotRun: the optimizer is in DeepSpeed alone and another engine runs.
    """
    name = plain(asked.name)
    if OF_OPTIMIZERS.own(name) is not None:
        return False
    only_there = name in map(plain, DEEPSPEEDS_OWN)
    if configuration.backend == "deepspeed":
        return only_there or name == "muon" or (configuration.offload != "none" and name in MADE_BY_DEEPSPEED_ON_CPU)
    if only_there:
        raise CannotRun(
            f"config: optimizer {asked.name} is in DeepSpeed alone; use AdamW (with communication.compression int8"
            " for gradients in 8 bits), or zero1, zero2 or zero3 with backend 'deepspeed'"
        )
    return False


def optimizer_by_name(asked: NamedParts) -> OptimizerFactory:
    """A function parameters -> the optimizer that a config asks for.

    Raises:
        CannotRun: the name or an argument is not known.
        BackendMissing: its library is not installed.
    """
    make = _maker(OF_OPTIMIZERS, asked, Optimizer)
    return lambda parameters: make(parameters)


def scheduler_by_name(asked: NamedParts) -> SchedulerFactory:
    """A function optimizer -> the scheduler that a config asks for.

    Raises:
        CannotRun: the name or an argument is not known.
    """
    make = _maker(OF_SCHEDULERS, asked, LRScheduler)
    return lambda optimizer: make(optimizer)


def adam(params: Iterable[Any], adam_w_mode: bool = True, **options: Any) -> Optimizer:
    """DeepSpeed's `Adam`, which decays weights as AdamW does unless `adam_w_mode` is false."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **options)


def _maker(registry: Registry, asked: NamedParts, kind: type[Made]) -> Callable[[Any], Made]:
    """What makes the thing from the parameters, or from the optimizer."""
    own = registry.own(asked.name)
    if own is not None:
        check_params(registry.word, asked, (own,))
        factory, params = own, dict(asked.params)
    else:
        factory, params = _built_in(registry, asked)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])  # JSON has lists

    def made(first: Any) -> Made:
        try:
            found = factory(first, **params)
        except (TypeError, ValueError) as problem:
            reason = " ".join(str(problem).split())
            raise CannotRun(f"config: {registry.word} {asked.name} refuses its params: {reason}") from problem
        if not isinstance(found, kind):
            raise CannotRun(f"config: {registry.word} {asked.name} is a {type(found).__name__}, not a {kind.__name__}")
        return found

    return made


def _built_in(registry: Registry, asked: NamedParts) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class or function, and the arguments to call it with."""
    word, named = registry.word, registry.built_in.get(plain(asked.name))
    if named is None:
        near = registry.nearest(asked.name)
        remedy = f"did you mean {near}?" if near else f"choose one of {', '.join(registry.names)}"
        raise CannotRun(f"config: {word} {asked.name} is not known; {remedy} (or dsplan.register_{word})")
    factory = _found(named.place, asked.name)
    signatures = (factory,) if named.accepts is None else (factory, _found(named.accepts, asked.name))
    check_params(word, asked, signatures, more=(*named.settled, *named.more))
    for name, value in named.settled.items():
        if value is not None and asked.params.get(name, value) != value:
            raise CannotRun(
                f"config: {word}.params.{name} is {asked.params[name]!r}, which only DeepSpeed's own {asked.name} can"
                " do; leave it out"
            )
    given = {name: value for name, value in asked.params.items() if name not in named.settled}
    return factory, {**named.defaults, **given}


def _found(place: str, name: str) -> Callable[..., Any]:
    module, _, attribute = place.partition(":")
    package = module.partition(".")[0]
    try:
        library = import_module(module)
    except ImportError:
        raise BackendMissing(
            f"config: optimizer {name} needs {package}; pip install {package}, or choose AdamW"
        ) from None
    found: Callable[..., Any] | None = getattr(library, attribute, None)
    if found is None:
        raise CannotRun(f"config: this {package} has no {name}; update {package}, or choose AdamW")
    return found
