"""Optimizers and schedulers that a config names, made for whichever strategy runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from planner.types.plan import Plan
from strategies.config.names import DEEPSPEEDS_OWN, MADE_BY_DEEPSPEED_ON_CPU, OPTIMIZERS, SCHEDULERS, Named, plain
from strategies.config.values import NamedParts
from strategies.errors import BackendMissing, CannotRun
from strategies.optim.muon import muon_groups
from strategies.protocols import OptimizerFactory, SchedulerFactory, TrainingParts

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
        """Return the known name that looks most like another, as it is spelled."""
        near = get_close_matches(plain(name), self._spelled, n=1)
        return self._spelled[near[0]] if near else None

    def add(self, name: str, factory: Factory) -> None:
        """Register under a name."""
        self._own[plain(name)] = factory
        self._spelled[plain(name)] = name

    def own(self, name: str) -> Factory | None:
        """Return what the script registered under a name."""
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


def check_params(word: str, named: NamedParts, factories: Sequence[Factory], more: Iterable[str] = ()) -> None:
    """Check the arguments that a config gives a factory against its signature.

    Args:
        word: `optimizer` or `scheduler`.
        named: the name and the arguments.
        factories: whose signatures together say what may be given; the last one's say what must.
        more: further names that are accepted.

    Raises:
        CannotRun: an argument is not known, or one that must be given is missing.
    """
    signatures = [_arguments(factory) for factory in factories]
    every = [argument for signature in signatures for argument in signature]
    names = {a.name for a in every if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)} | set(more)
    takes_any = any(a.kind is a.VAR_KEYWORD for a in signatures[-1])
    for key in named.params:
        if key not in names and not takes_any:
            near = get_close_matches(key, names, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(names))}"
            raise CannotRun(f"config: {word}.params.{key} is not known to {named.name}; {_INSTEAD.get(key, remedy)}")
    for a in signatures[-1]:
        if a.default is a.empty and a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY) and a.name not in named.params:
            raise CannotRun(f"config: {word}.params.{a.name} is missing; {named.name} needs it")


def require_numbers(word: str, named: NamedParts) -> None:
    """Stop at a number in quotes, alone or in a list; YAML reads `1e-3`, without a point, as a text too.

    Raises:
        CannotRun: naming the argument and what to write.
    """
    for key, value in named.params.items():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            number = _read_number(item) if isinstance(item, str) else None
            if number is not None:
                raise CannotRun(f"config: {word}.params.{key} is {value!r}, a text; write the number {number:g}")


def _read_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _arguments(factory: Factory) -> list[inspect.Parameter]:
    """Return what a factory takes beside the parameters or the optimizer, which come first."""
    return list(inspect.signature(factory).parameters.values())[1:]


Part = TypeVar("Part")


def resolve_names(parts: TrainingParts) -> TrainingParts:
    """Resolve the names of a config's optimizer and scheduler, where the script brings none itself.

    Raises:
        CannotRun: a name or an argument is not known, or a number is written as a text.
        BackendMissing: the optimizer's library is not installed.
    """
    optimizer, scheduler = parts.script.optimizer, parts.script.scheduler
    for registry, named in ((OF_OPTIMIZERS, optimizer), (OF_SCHEDULERS, scheduler)):
        if named is not None and registry.own(named.name) is None:
            require_numbers(registry.word, named)
    if scheduler is not None and parts.lr_scheduler is None:
        parts = replace(parts, lr_scheduler=scheduler_by_name(scheduler))
    if optimizer is None and parts.optimizer is None and parts.plan.configuration.optimizer == "muon":
        optimizer = NamedParts(name="Muon")
    if optimizer is None or parts.optimizer is not None or made_by_deepspeed(optimizer, parts.plan):
        return parts
    if plain(optimizer.name) == "muon":
        parts = replace(parts, model_parameters=muon_groups(parts.model, parts.model_parameters))
    return replace(parts, optimizer=optimizer_by_name(optimizer))


def made_by_deepspeed(named: NamedParts, plan: Plan) -> bool:
    """Return whether DeepSpeed makes an optimizer: its own classes and, for states that left a GPU, those for the CPU.

    On CPU ranks these are torch's, as the plan counted them: DeepSpeed's would be compiled before the first step, for
    minutes.

    Raises:
        CannotRun: the optimizer is in DeepSpeed alone and another engine runs.
    """
    name, configuration = plain(named.name), plan.configuration
    if OF_OPTIMIZERS.own(name) is not None:
        return False
    only_there = name in map(plain, DEEPSPEEDS_OWN)
    if configuration.backend == "deepspeed":
        leaves_gpu = configuration.offload != "none" and plan.cluster.get("vendor") != "cpu"
        return only_there or name == "muon" or (leaves_gpu and name in MADE_BY_DEEPSPEED_ON_CPU)
    if only_there:
        raise CannotRun(
            f"config: optimizer {named.name} is in DeepSpeed alone; use AdamW (with communication.compression int8"
            " for gradients in 8 bits), or zero1, zero2 or zero3 with backend 'deepspeed'"
        )
    return False


def optimizer_by_name(named: NamedParts) -> OptimizerFactory:
    """Return a function parameters -> the optimizer that a config asks for.

    Raises:
        CannotRun: the name or an argument is not known.
        BackendMissing: its library is not installed.
    """
    return _prepare(OF_OPTIMIZERS, named, Optimizer)


def scheduler_by_name(named: NamedParts) -> SchedulerFactory:
    """Return a function optimizer -> the scheduler that a config asks for.

    Raises:
        CannotRun: the name or an argument is not known.
    """
    return _prepare(OF_SCHEDULERS, named, LRScheduler)


def adam(params: Iterable[Any], adam_w_mode: bool = True, **options: Any) -> Optimizer:
    """Make DeepSpeed's `Adam`, which decays weights as AdamW does unless `adam_w_mode` is false."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **options)


def _prepare(registry: Registry, named: NamedParts, kind: type[Part]) -> Callable[[Any], Part]:
    """Return a function that makes the part from the parameters, or from the optimizer."""
    own = registry.own(named.name)
    if own is not None:
        check_params(registry.word, named, (own,))
        factory, params = own, dict(named.params)
    else:
        factory, params = _find_built_in(registry, named)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])  # JSON has lists

    def make(first: Any) -> Part:
        try:
            part = factory(first, **params)
        except (TypeError, ValueError) as problem:
            reason = " ".join(str(problem).split())
            raise CannotRun(f"config: {registry.word} {named.name} refuses its params: {reason}") from problem
        if not isinstance(part, kind):
            raise CannotRun(f"config: {registry.word} {named.name} is a {type(part).__name__}, not a {kind.__name__}")
        return part

    return make


def _find_built_in(registry: Registry, named: NamedParts) -> tuple[Factory, dict[str, Any]]:
    """Return the class or function, and the arguments to call it with."""
    word, entry = registry.word, registry.built_in.get(plain(named.name))
    if entry is None:
        near = registry.nearest(named.name)
        remedy = f"did you mean {near}?" if near else f"choose one of {', '.join(registry.names)}"
        raise CannotRun(f"config: {word} {named.name} is not known; {remedy} (or dsplan.register_{word})")
    factory = _import_factory(entry.path, named.name)
    signatures = (factory,) if entry.accepts is None else (factory, _import_factory(entry.accepts, named.name))
    check_params(word, named, signatures, more=(*entry.settled, *entry.more))
    for name, value in entry.settled.items():
        if value is not None and named.params.get(name, value) != value:
            raise CannotRun(
                f"config: {word}.params.{name} is {named.params[name]!r}, which only DeepSpeed's own {named.name} can"
                " do; leave it out"
            )
    params = {name: value for name, value in named.params.items() if name not in entry.settled}
    return factory, {**entry.defaults, **params}


def _import_factory(path: str, name: str) -> Factory:
    module, _, attribute = path.partition(":")
    package = module.partition(".")[0]
    try:
        library = import_module(module)
    except ImportError:
        raise BackendMissing(
            f"config: optimizer {name} needs {package}; pip install {package}, or choose AdamW"
        ) from None
    factory: Factory | None = getattr(library, attribute, None)
    if factory is None:
        raise CannotRun(f"config: this {package} has no {name}; update {package}, or choose AdamW")
    return factory
