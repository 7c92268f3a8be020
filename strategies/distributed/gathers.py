"""Forward passes that gather sharded weights, noted where they begin, so that one rank alone in one is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from strategies.run_directory.heartbeat import PULSE


class ModelHook:
    """A hook on a model that is sharded: copies of the model, such as moving averages, go without."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Call what the hook is for, outside of copies."""
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    return None


class Parted(RuntimeError):
    """The ranks have made different calls, which all of them must make alike."""


def require_alike(total: float, ranks: int) -> None:
    """Compare how often ranks have met: `total` is the sum over all `ranks`.

    Where weights travel as messages, those of different calls fit each other without a sign.

    Raises:
        Parted: they have not met equally often.
    """
    if total != PULSE.number * ranks:
        raise Parted(
            "some rank has called the model, or what else gathers sharded tensors, more often than others; weights may"
            " have been mixed up since"
        )


def note_gathers(units: Iterable[nn.Module], is_sharded: Callable[[nn.Module], bool]) -> None:
    """Note the forward passes of modules whose weights are gathered from all ranks: of nested ones the outermost.

    Call it when they have their own hooks, for it must come before what waits for other ranks. `is_sharded` says
    whether a module's forward pass would gather anything as it is now.
    """

    def begin(unit: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            counts = PULSE.depth == 0 and is_sharded(unit)
            PULSE.enter("forward" if torch.is_grad_enabled() else "evaluation", counts=counts)

    for unit in units:
        unit.register_forward_pre_hook(ModelHook(begin), prepend=True)
        unit.register_forward_hook(ModelHook(_end), always_call=True)


def _end(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        PULSE.leave()
