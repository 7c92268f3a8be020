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
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelHook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    return None


def note_gathers(units: Iterable[nn.Module]) -> None:
    """Note the forward passes of modules whose weights are gathered from all ranks, the outermost of those that are in
    each other. Call it when they have their own hooks: this must come before what waits for other ranks."""
    for unit in units:
        unit.register_forward_pre_hook(ModelHook(_begin), prepend=True)
        unit.register_forward_hook(ModelHook(_end), always_call=True)


def _begin(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        PULSE.enter("forward" if torch.is_grad_enabled() else "evaluation")


def _end(*_: Any) -> None:
    if not torch.compiler.is_compiling():
        PULSE.leave()
