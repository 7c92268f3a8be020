"""Wire: the two collectives that ZeRO is made of, begun now and waited for later.

NCCL has both as one call. Over gloo, whose reduce-scatter is an all-reduce with a copy and whose all-gather copies
twice, every rank sends the others exactly what they need instead: half the bytes of an all-reduce, no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hardware_db.microbench import one_tensor
from strategies.zero.partition import Layout, Ranks

_GATHER_TAG, _REDUCE_TAG = 9401, 9402
"""Messages of one kind are matched in the order they are sent, which is the same on every rank."""


class Arrival(Protocol):
    """Weights on their way."""

    def wait(self) -> None: ...


class Sum(Protocol):
    """A sum over ranks on its way."""

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's run of the sum in `dtype`, [layout.run] or without its padding; waits for it."""


class Wire(ABC):
    """Collectives over the ranks that share one copy of the states."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.group = group

    needs_padding = False
    """Whether a buffer to be summed must have a whole run for every rank."""

    @abstractmethod
    def gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Fill `whole`, [layout.padded], with every rank's `part`, [layout.run], which may be its own run of it."""

    @abstractmethod
    def sum_to_owners(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Add up the ranks' buffers, each run on its owner; `buffer` must not be touched until the sum is there."""

    def sum_everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over ranks, on every rank; in place."""
        if self.ranks.world_size > 1:
            dist.all_reduce(values, group=self.group)
        return values


class Alone(Wire):
    """One rank: there is nothing to exchange."""

    def gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        _copy_own(whole, part, layout)
        return _Done()

    def sum_to_owners(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        return _Own(buffer)


class Collectives(Wire):
    """NCCL's all-gather and reduce-scatter, on its own streams."""

    needs_padding = True

    def gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        work: Arrival = one_tensor.all_gather(whole, part, group=self.group, async_op=True)
        return work

    def sum_to_owners(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        part = buffer.new_empty(layout.run)
        return _Scattered(part, one_tensor.reduce_scatter(part, buffer, group=self.group, async_op=True))


class Messages(Wire):
    """Messages from rank to rank: each run goes to its owner, who adds up what arrives."""

    def gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        _copy_own(whole, part, layout)
        sent = self._exchange(whole, whole, layout, is_gather=True)
        return _All(sent)

    def sum_to_owners(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        first, last = layout.own
        received = buffer.new_empty((self.ranks.world_size - 1, last - first))
        work = self._exchange(buffer, received, layout, is_gather=False)
        return _Collected(buffer, buffer[first:last], received, work)

    def _exchange(self, source: torch.Tensor, target: torch.Tensor, layout: Layout, *, is_gather: bool) -> list[Any]:
        """Gather: my run to everyone, theirs into `target`. Else: everyone's run to them, mine from each into a row."""
        tag = _GATHER_TAG if is_gather else _REDUCE_TAG
        rank, world = self.ranks.rank, self.ranks.world_size
        own = slice(*layout.own)
        work: list[Any] = []
        # Each rank begins with the next one, so that they do not all send to the same.
        for distance in range(1, world):
            to, source_rank = (rank + distance) % world, (rank - distance) % world
            incoming = target[slice(*layout.bounds(source_rank))] if is_gather else target[distance - 1]
            outgoing = source[own] if is_gather else source[slice(*layout.bounds(to))]
            if incoming.numel():
                work.append(dist.irecv(incoming, self._global(source_rank), self.group, tag))
            if outgoing.numel():
                work.append(dist.isend(outgoing, self._global(to), self.group, tag))
        return work

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def wire_for(ranks: Ranks, device: torch.device) -> Wire:
    """The wire that suits the device's process group."""
    if ranks.world_size == 1:
        return Alone(ranks)
    return Collectives(ranks) if device.type == "cuda" else Messages(ranks)


def _copy_own(whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> None:
    first, last = layout.own
    own = whole[first:last]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part[: last - first])


class _Done:
    def wait(self) -> None:
        return None


class _All:
    def __init__(self, work: list[Any]) -> None:
        self._work = work

    def wait(self) -> None:
        for one in self._work:
            one.wait()


class _Own:
    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        return self._buffer.to(dtype)


class _Scattered:
    def __init__(self, part: torch.Tensor, work: Any) -> None:
        self._part, self._work = part, work

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        self._work.wait()
        return self._part.to(dtype)


class _Collected:
    def __init__(self, buffer: torch.Tensor, own: torch.Tensor, received: torch.Tensor, work: list[Any]) -> None:
        self._buffer, self._own, self._received, self._work = buffer, own, received, work

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        for one in self._work:
            one.wait()
        if len(self._received) == 1 and self._received.dtype == dtype:
            return self._received[0].add_(self._own)
        # Several 16-bit values are added in fp32 and rounded once.
        wide = dtype if dtype == torch.float64 else torch.float32
        total = self._own.to(wide, copy=True)
        for row in self._received:
            total.add_(row)
        return total.to(dtype)
