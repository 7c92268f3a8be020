"""What an optimizer needs of the strategy that runs it: whole tensors, sparse gradients, a closure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn, optim

from strategies.errors import CannotRun

_ELEMENT_BY_ELEMENT = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
    optim.SparseAdam,
)
"""torch's optimizers that treat every element by itself, so that any part of a tensor can be stepped alone."""

WHOLE_TENSORS = "whole_tensors"
"""The attribute of an optimizer, or the option of one of its groups, that says whether it needs whole tensors."""


def needs_whole_tensors(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a group must be stepped whole.

    The group's option `whole_tensors` decides, else the optimizer's attribute of that name. An optimizer that says
    nothing steps whole tensors, unless it is one of torch's that work element by element: norms of tensors (LAMB), rows
    and columns (Adafactor), matrices (Muon, Shampoo) and blocks of 256 values (8-bit) all give other results on parts.
    """
    said = group.get(WHOLE_TENSORS, getattr(optimizer, WHOLE_TENSORS, None))
    return type(optimizer) not in _ELEMENT_BY_ELEMENT if said is None else bool(said)


def undivided(optimizer: optim.Optimizer) -> Iterator[nn.Parameter]:
    """The parameters that an optimizer must step whole."""
    for group in optimizer.param_groups:
        if needs_whole_tensors(optimizer, group):
            yield from group["params"]


def takes_sparse_gradients_only(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer steps the rows that a gradient has, and refuses gradients that have them all."""
    return isinstance(optimizer, optim.SparseAdam)


def require_steppable(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that computes the loss itself.

    Raises:
        CannotRun: its `step` cannot be called without a closure, and `engine.step()` has none.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CannotRun(
            f"optimizer {type(optimizer).__name__} computes the loss again in a closure, which engine.step() has not;"
            " use AdamW, or another optimizer whose step() takes none"
        )
