"""Gradients of the torch strategies: their norm over all ranks, and their scaling.

Shards are worked on as plain tensors: DTensor's own arithmetic costs tens of microseconds per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients in fp64, a scalar on their device; every rank of sharded ones calls it.

    Replicated gradients are the same on every rank already. Sharded ones share one device mesh.
    """
    parameters = list(parameters)
    values = [value for value in _values(parameters) if value.numel()]
    if values:
        norms = torch._foreach_norm(values, 2, dtype=_norm_dtype(values))
        square = torch.stack(norms).double().square().sum()
    else:
        square = torch.zeros((), dtype=torch.float64)
    sharded = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    if sharded is not None:
        square = square.to(sharded.device)
        for dimension, placement in enumerate(sharded.placements):
            if placement.is_shard():
                dist.all_reduce(square, group=sharded.device_mesh.get_group(dimension))
    return square.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by a factor, in place."""
    if factor != 1.0 and (values := _values(parameters)):
        torch._foreach_mul_(values, factor)


def _values(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """What this rank holds of every gradient: the shard, or the values of a sparse one."""
    values: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # The sum of repeated rows is what counts; it replaces them.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        values.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return values


def _norm_dtype(values: list[torch.Tensor]) -> torch.dtype:
    is_double = any(value.dtype == torch.float64 for value in values)
    return torch.float64 if is_double else torch.float32
