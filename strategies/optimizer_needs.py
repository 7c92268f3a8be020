"""What an optimizer needs of the strategy that runs it: whole tensors, sparse gradients, a closure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn, optim

from planner.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES
from strategies.errors import CannotRun
from strategies.protocols import TrainingParts

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

_REFUSES_FLAT = tuple(kind for kind in (getattr(optim, "Muon", None), optim.SparseAdam) if kind is not None)
_ELSEWHERE = "ddp, or zero1 to zero3 with backend 'native'"
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


def undivided(optimizer: optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Those of `parameters` that an optimizer must step whole, now or when it is given them."""
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        if needs_whole_tensors(optimizer, group_of.get(parameter, {})):
            yield parameter


def takes_sparse_gradients_only(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer steps the rows that a gradient has, and refuses gradients that have them all."""
    return isinstance(optimizer, optim.SparseAdam)


def fitting(parts: TrainingParts) -> TrainingParts:
    """The parts, with an optimizer that is refused as soon as it is made where the plan's strategy cannot step it.

    Raises:
        CannotRun: it exists and cannot be stepped, or the model makes gradients that the strategy cannot reduce.
    """
    given, configuration = parts.optimizer, parts.plan.configuration
    _refuse_sparse_layers(parts.model, configuration)
    if isinstance(given, optim.Optimizer):
        _refuse(given, configuration)
    if given is None or isinstance(given, optim.Optimizer):
        return parts

    def made(parameters: Iterable[Any]) -> optim.Optimizer:
        optimizer = given(parameters)
        _refuse(optimizer, configuration)
        return optimizer

    return replace(parts, optimizer=made)


def _refuse(optimizer: optim.Optimizer, configuration: Configuration) -> None:
    name, strategy = type(optimizer).__name__, configuration.strategy
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise CannotRun(
            f"optimizer {name} computes the loss again in a closure, which engine.step() has not; use AdamW, or another"
            " optimizer whose step() takes none"
        )
    if strategy in FSDP_STRATEGIES and isinstance(optimizer, optim.Adafactor):
        raise CannotRun(f"optimizer {name} cannot step the shards of strategy {strategy!r}; use {_ELSEWHERE}")
    is_whole = isinstance(optimizer, _REFUSES_FLAT) or getattr(optimizer, WHOLE_TENSORS, False)
    if configuration.backend == "deepspeed" and (is_whole or any(g.get(WHOLE_TENSORS) for g in optimizer.param_groups)):
        raise CannotRun(f"optimizer {name} cannot step the flat tensors of backend 'deepspeed'; use {_ELSEWHERE}")


def _refuse_sparse_layers(model: nn.Module, configuration: Configuration) -> None:
    """FSDP2 and DeepSpeed's ZeRO reduce flat dense tensors."""
    if configuration.strategy not in FSDP_STRATEGIES and configuration.backend != "deepspeed":
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise CannotRun(
                f"{name or 'the model'} makes sparse gradients, which strategy {configuration.strategy!r} of backend"
                f" {configuration.backend!r} cannot reduce; make it with sparse=False, or use {_ELSEWHERE}"
            )
