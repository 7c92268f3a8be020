"""Rates of collectives of the live process group. Every rank calls these together, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hardware_db.microbench.grid import Point, Rate
from hardware_db.microbench.timer import DTYPES, Budget, time_calls
from hardware_db.records import dataclass

# All-gather and reduce-scatter of one tensor per rank, by the name that the installed torch knows them under.


all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(whole tensor out, this rank's part in, group=None, async_op=False)."""
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""(this rank's part out, whole tensor in, group=None, async_op=False)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """Tensors that a collective works on.

    The whole tensor, its parts (one per rank), a part of this rank's own, and a tensor that may be written over.
    """

    whole: torch.Tensor
    parts: list[torch.Tensor]
    own: torch.Tensor
    target: torch.Tensor


def bus_bandwidth(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bus bandwidth of a collective over a tensor of `size` bytes, as nccl-tests defines it.

    Bytes/s that each link would have to carry. `size` is that of the whole tensor: what all-gather makes and
    reduce-scatter starts from.
    """
    tensors = _tensors(point, device)
    call = CALLS[point.operation]
    timing = time_calls(lambda: call(tensors), device, budget, collective=True)
    size = tensors.whole.numel() * tensors.whole.element_size()
    value = bus_share(point.operation, dist.get_world_size()) * size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def latency(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Seconds of a barrier, or of an all-reduce of 4 bytes."""
    one = torch.zeros(1, device=device)
    call = dist.barrier if point.operation == "barrier" else lambda: dist.all_reduce(one)
    timing = time_calls(call, device, budget, collective=True)
    return Rate(point=point, value=timing.seconds, unit="s", repeats=timing.repeats, spread=timing.spread)


def bus_share(operation: str, ranks: int) -> float:
    """Bytes that pass a rank's link per byte of the whole tensor (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce", "point_to_point") else (ranks - 1) / ranks


def _tensors(point: Point, device: torch.device) -> Tensors:
    """Of the size asked for, rounded up to a whole number of elements per rank."""
    ranks, dtype = dist.get_world_size(), DTYPES[point.dtype]
    share = max(1, -(-point.size // (ranks * dtype.itemsize)))
    whole = torch.zeros(share * ranks, dtype=dtype, device=device)
    target = torch.zeros_like(whole)
    return Tensors(whole=whole, parts=list(target.chunk(ranks)), own=torch.zeros_like(whole[:share]), target=target)


def _all_reduce(tensors: Tensors) -> None:
    dist.all_reduce(tensors.whole)


def _all_gather(tensors: Tensors) -> None:
    all_gather(tensors.whole, tensors.own)


def _reduce_scatter(tensors: Tensors) -> None:
    reduce_scatter(tensors.own, tensors.whole)


def _all_to_all(tensors: Tensors) -> None:
    dist.all_to_all_single(tensors.target, tensors.whole)


def _broadcast(tensors: Tensors) -> None:
    dist.broadcast(tensors.whole, src=0)


def _reduce(tensors: Tensors) -> None:
    dist.reduce(tensors.whole, dst=0)


def _gather(tensors: Tensors) -> None:
    dist.gather(tensors.own, tensors.parts if dist.get_rank() == 0 else None, dst=0)


def _scatter(tensors: Tensors) -> None:
    dist.scatter(tensors.own, tensors.parts if dist.get_rank() == 0 else None, src=0)


def _point_to_point(tensors: Tensors) -> None:
    """Every even rank sends to the next one; without one it rests."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank % 2:
        dist.recv(tensors.whole, src=rank - 1)
    elif rank + 1 < ranks:
        dist.send(tensors.whole, dst=rank + 1)


CALLS: Mapping[str, Callable[[Tensors], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "point_to_point": _point_to_point,
}
