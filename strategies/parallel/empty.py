"""Weights without memory: models whose parameters have shapes and dtypes, until ranks read their own parts from files.

A script builds its model on the meta device (`empty_weights`). From `initialize` to the moment that a strategy places
a weight, a *stand-in* is in its place: one zero in host memory under the weight's shape. Layers, experts and stages are
split with it, adapters are put beside it, and optimizers hold the parameter, which stays the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from strategies.errors import CannotRun
from strategies.torch_compat.tensors import own_parameters, swap_tensors, transient_buffers

_ATTRIBUTE = "_dsplan_empty"


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules inside with parameters on the meta device, which take no memory; buffers are computed as ever.

    `dsplan.initialize(model, weights=DIRECTORY)` then has every rank read its own parts of them from safetensors files.
    Modules are built so in the whole process while the context is open. What a constructor allocates for a parameter
    itself is freed when it is registered, so that at most one is there at a time.
    """
    register: Any = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = own_parameters(module)[name]
        if held is not None and not held.is_meta and type(held) is nn.Parameter:
            empty = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
            vars(empty).update(vars(held))
            own_parameters(module)[name] = empty

    kind: Any = nn.Module
    kind.register_parameter = register_empty
    try:
        yield
    finally:
        kind.register_parameter = register


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return zeros of no memory in the place of a weight."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a weight has a shape and no memory of its own; a weight of one element always has it."""
    return tensor.numel() > 1 and not tensor.is_meta and not any(tensor.stride())


def leave_empty(model: nn.Module) -> frozenset[str]:
    """Put stand-ins in the place of a model's weights on the meta device; return their names, and all of tied ones.

    Weights of one element, and persistent buffers, get their memory now.

    Raises:
        CannotRun: a buffer is on the meta device that no file has.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in transient_buffers(module):
                raise CannotRun(
                    f"{_joined(prefix, name)} is a buffer on the meta device, which weights in files do not have; build"
                    " the model under dsplan.empty_weights(), which computes buffers"
                )
    names = [name for name, weight in _named(model) if weight.is_meta]
    for name, weight in list(_named(model)):
        if not weight.is_meta:
            continue
        is_parameter = isinstance(weight, nn.Parameter)
        if is_parameter and weight.numel() > 1:
            values = stand_in(weight.shape, weight.dtype)
        else:
            values = torch.zeros(weight.shape, dtype=weight.dtype)
        if is_parameter:
            swap_tensors(weight, nn.Parameter(values, requires_grad=weight.requires_grad))
        else:
            prefix, _, own = name.rpartition(".")
            setattr(model.get_submodule(prefix), own, values)
    if names:
        vars(model)[_ATTRIBUTE] = True
    return frozenset(names)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def has_stand_ins(model: nn.Module) -> bool:
    """Return whether weights of a model are to be read from files, so that ranks need not be sent rank 0's."""
    return bool(vars(model).get(_ATTRIBUTE))


def weights_are_read(model: nn.Module) -> None:
    """Note that the model has its weights."""
    vars(model).pop(_ATTRIBUTE, None)


def give_memory(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give weights memory on a device in the place of stand-ins, uninitialised: they are read next."""
    for tensor in tensors:
        if is_stand_in(tensor):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in another dtype; a stand-in stays one."""
    return stand_in(tensor.shape, dtype, tensor.device) if is_stand_in(tensor) else tensor.detach().to(dtype)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
