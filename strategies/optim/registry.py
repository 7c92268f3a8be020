"""Optimizers and schedulers that a config names, made for whichever strategy runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.types.plan import Plan
from strategies.config import NamedParts
from strategies.config.names import DEEPSPEEDS_OWN, MADE_BY_DEEPSPEED_ON_CPU, OPTIMIZERS, SCHEDULERS, Named, plain
from strategies.errors import BackendMissing, CannotRun
from strategies.optim.muon import muon_groups
from strategies.protocols import OptimizerFactory, SchedulerFactory, TrainingParts

# Names that a script gives its own optimizers and schedulers, so that a config can name them.


Factory = Callable[..., Any]
_INSTEAD = {"max_grad_norm": "use the config's gradient_clipping"}


class Registry:
    """The optimizers, or the schedulers, that a config can name: the script's own before those built in."""

    def __init__(self, word: str, built_in: Mapping[str, Named]) -> None:
        self.word, self.built_in = word, built_in
        self._own: dict[str, Factory] = {}
        self._spelled = {key: named.name for key, named in built_in.items()}

    @property
    def names(self) -> list[str]:
        """All names, as they are spelled."""
        return sorted(self._spelled.values(), key=str.lower)

    def nearest(self, name: str) -> str | None:
        """The known name that looks most like another, as it is spelled."""
        near = get_close_matches(plain(name), self._spelled, n=1)
        return self._spelled[near[0]] if near else None

    def add(self, name: str, factory: Factory) -> None:
        """Register under a name."""
        self._own[plain(name)] = factory
        self._spelled[plain(name)] = name

    def own(self, name: str) -> Factory | None:
        """What the script registered under a name."""
        return self._own.get(plain(name))


OF_OPTIMIZERS = Registry("optimizer", OPTIMIZERS)
OF_SCHEDULERS = Registry("scheduler", SCHEDULERS)


def register_optimizer(name: str, factory: Factory) -> None:
    """Let configs name an optimizer: `{"optimizer": {"type": name, "params": {...}}}`, before the ones built in.

    Args:
        name: in any case; `-` and `_` do not count.
        factory: a class or function: parameters (or groups) first, then what `params` may say.
    """
    OF_OPTIMIZERS.add(name, factory)


def register_scheduler(name: str, factory: Factory) -> None:
    """Let configs name a scheduler: `{"scheduler": {"type": name, "params": {...}}}`, before the ones built in.

    Args:
        name: in any case; `-` and `_` do not count.
        factory: a class or function: the optimizer first, then what `params` may say; gives a torch LRScheduler.
    """
    OF_SCHEDULERS.add(name, factory)


def check_params(word: str, asked: NamedParts, factories: Sequence[Factory], more: Iterable[str] = ()) -> None:
    """Check the arguments that a config gives a factory against its signature.

    Args:
        word: `optimizer` or `scheduler`.
        asked: the name and the arguments.
        factories: whose signatures together say what may be given; the last one's say what must.
        more: further names that are accepted.

    Raises:
        CannotRun: an argument is not known, or one that must be given is missing.
    """
    signatures = [_arguments(factory) for factory in factories]
    every = [argument for signature in signatures for argument in signature]
    known = {a.name for a in every if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)} | set(more)
    takes_any = any(a.kind is a.VAR_KEYWORD for a in signatures[-1])
    for key in asked.params:
        if key not in known and not takes_any:
            near = get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            remedy = _INSTEAD.get(key, remedy)
            raise CannotRun(f"config: {word}.params.{key} is not known to {asked.name}; {remedy}")
    for a in signatures[-1]:
        if a.default is a.empty and a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY) and a.name not in asked.params:
            raise CannotRun(f"config: {word}.params.{a.name} is missing; {asked.name} needs it")


def require_numbers(word: str, asked: NamedParts) -> None:
    """Stop at a number in quotes, alone or in a list; YAML reads `1e-3`, without a point, as a text too.

    Raises:
        CannotRun: naming the argument and what to write.
    """
    for key, value in asked.params.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            number = _number_of(item) if isinstance(item, str) else None
            if number is not None:
                raise CannotRun(f"config: {word}.params.{key} is {value!r}, a text; write the number {number:g}")


def _number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _arguments(factory: Factory) -> list[inspect.Parameter]:
    """What a factory takes beside the parameters or the optimizer, which come first."""
    is_settings = is_dataclass(factory)
    return list(inspect.signature(factory).parameters.values())[0 if is_settings else 1 :]


Made = TypeVar("Made")


def resolve_names(parts: TrainingParts) -> TrainingParts:
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
    if optimizer is None and parts.optimizer is None and parts.plan.configuration.optimizer == "muon":
        optimizer = NamedParts(name="Muon")
    if optimizer is None or parts.optimizer is not None or made_by_deepspeed(optimizer, parts.plan):
        return parts
    if plain(optimizer.name) == "muon":
        parts = replace(parts, model_parameters=muon_groups(parts.model, parts.model_parameters))
    return replace(parts, optimizer=optimizer_by_name(optimizer))


def made_by_deepspeed(asked: NamedParts, plan: Plan) -> bool:
    """Whether DeepSpeed makes an optimizer from the config, as it must its own classes and, for states that left a
    GPU, those for the CPU. On CPU ranks these are torch's, as the plan counted them: DeepSpeed's would be compiled
    before the first step, for minutes.

    Raises:
        CannotRun: the optimizer is in DeepSpeed alone and another engine runs.
    """
    name, configuration = plain(asked.name), plan.configuration
    if OF_OPTIMIZERS.own(name) is not None:
        return False
    only_there = name in map(plain, DEEPSPEEDS_OWN)
    if configuration.backend == "deepspeed":
        leaves_gpu = configuration.offload != "none" and plan.cluster.get("vendor") != "cpu"
        return only_there or name == "muon" or (leaves_gpu and name in MADE_BY_DEEPSPEED_ON_CPU)
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
    factory = _found(named.path, asked.name)
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
