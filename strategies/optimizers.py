"""Optimizers by the plan's names, and the move of an optimizer from whole parameters to their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from strategies.errors import BackendMissing, CannotRun
from strategies.lion import Lion
from strategies.protocols import OptimizerFactory


def _adamw_8bit(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    try:
        library = import_module("bitsandbytes")
    except ImportError:
        raise BackendMissing(
            "optimizer 'adamw-8bit' needs bitsandbytes; pip install bitsandbytes, or choose optimizer 'adamw'"
        ) from None
    made: torch.optim.Optimizer = library.optim.AdamW8bit(parameters)
    return made


OPTIMIZERS: Mapping[str, OptimizerFactory] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-forloop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw-8bit": _adamw_8bit,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "lion": Lion,
}


def trainable_parameters(model: nn.Module, chosen: Iterable[Any] | None) -> list[Any]:
    """The script's own choice of parameters or groups, or every parameter that requires a gradient.

    Raises:
        CannotRun: there is nothing to train.
    """
    parameters = list(chosen) if chosen is not None else [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise CannotRun("the model has no parameter that requires a gradient; unfreeze some before initialize")
    return parameters


class ParameterMove:
    """Follows parameters through a wrapping that replaces them, as `fully_shard` does.

    Make it before the wrapping; afterwards it translates parameters, groups and whole optimizers to the new tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[torch.Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def parameters(self, wrapped: nn.Module, old: Iterable[Any]) -> list[Any]:
        """The replacements of parameters, of (name, parameter) pairs, or of groups of either.

        Raises:
            CannotRun: a parameter is not the model's.
        """
        translate = self._translator(wrapped)
        return [translated(item, translate) for item in old]

    def optimizer(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Point an optimizer made from the whole parameters at their replacements, groups and settings unchanged.

        Raises:
            CannotRun: the optimizer has stepped already (its state has the shapes of whole parameters).
        """
        translate = self._translator(wrapped)
        groups = [[translate(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        moved = any(
            new is not old
            for group, new_group in zip(optimizer.param_groups, groups, strict=True)
            for old, new in zip(group["params"], new_group, strict=True)
        )
        if moved and optimizer.state:
            raise CannotRun("the optimizer has stepped before initialize; pass a fresh one and use load_checkpoint")
        for group, new_group in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = new_group

    def _translator(self, wrapped: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        replacements = dict(wrapped.named_parameters(remove_duplicate=False))

        def translate(parameter: torch.Tensor) -> torch.Tensor:
            name = self._names.get(parameter)
            if name is None:
                raise CannotRun("the optimizer holds a parameter that is not the model's; build it from this model")
            return replacements[name]

        return translate


def translated(item: Any, translate: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A parameter, a (name, parameter) pair, or a group of either, with every parameter replaced."""
    if isinstance(item, Mapping):
        members = item["params"]
        members = [members] if isinstance(members, torch.Tensor) else members
        return {**item, "params": [translated(member, translate) for member in members]}
    if isinstance(item, tuple):
        return item[0], translate(item[1])
    return translate(item)
