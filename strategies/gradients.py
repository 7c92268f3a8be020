"""Gradients of the torch strategies: their norm over all ranks, their scaling, and their sums over micro-batches.

Shards are worked on as plain tensors: DTensor's own arithmetic costs tens of microseconds per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.errors import CannotRun

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


class WideSums:
    """Gradients of earlier micro-batches, added up in fp32 where they are narrower, at 4 bytes per element."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take over the gradients of a backward pass that is not a step's last."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.dtype not in (torch.bfloat16, torch.float16):
                continue
            parameter.grad = None
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient.float()

    def give_back(self) -> None:
        """Rounded once, the sums are the gradients that the step's last backward pass adds to, and reduces."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()


def wide_sums(asked: str | None, parameters: Iterable[nn.Parameter]) -> WideSums | None:
    """What `data_types.grad_accum_dtype` asks for; None where gradients are in that dtype anyway.

    Raises:
        CannotRun: it asks for a narrower dtype than that of the gradients.
    """
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if asked is None or dtypes == {_DTYPES[asked]}:
        return None
    if asked != "fp32":
        raise CannotRun(
            f"config: data_types.grad_accum_dtype is {asked!r} and the gradients of this strategy are"
            f" {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}; leave it out, or use ZeRO"
        )
    return WideSums()


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
