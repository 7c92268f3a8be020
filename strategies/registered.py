"""Names that a script gives its own optimizers and schedulers, so that a config can name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

from strategies.config import NamedParts
from strategies.errors import CannotRun
from strategies.names import OPTIMIZERS, SCHEDULERS, Named, plain

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
        for one in value if isinstance(value, (list, tuple)) else (value,):
            number = _number_of(one) if isinstance(one, str) else None
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
