"""The two collectives that ZeRO is made of, launched now and waited for later.

NCCL has both as one call. Over gloo, whose reduce-scatter is an all-reduce with a copy and whose all-gather copies
twice, every rank sends the others exactly what they need instead: half the bytes of an all-reduce, no copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hardware_db.microbench import collectives
from strategies.backends.zero.flat_shard import Layout, Ranks
from strategies.parallel.mesh import Group, Mesh
from strategies.run_directory.heartbeat import PULSE

_GATHER_TAG, _REDUCE_TAG, _EXCHANGE_TAG = 1, 2, 3
"""Messages of one kind and meeting are matched in the order they are sent, which is the same on every rank."""
_STAMPS = 2**24


def _tag(kind: int) -> int:
    """Return the tag of a message: a rank whose script calls something else waits, and takes no other's for its own."""
    return 4 * (PULSE.stamp % _STAMPS) + kind


class Arrival(Protocol):
    """Weights on their way."""

    def wait(self) -> None:
        """Wait until they are there."""


class Arrived:
    """Work that is complete already."""

    def wait(self) -> None:
        """Return at once."""


class Sum(Protocol):
    """A sum over ranks on its way."""

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        """Wait for this rank's run of the sum and return it in `dtype`, [layout.run] or without its padding."""


class Collectives(ABC):
    """Collectives over the ranks that share one copy of the states."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.group = group

    needs_padding = False
    """True if a buffer to be reduced must have a whole run for every rank."""

    @abstractmethod
    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Fill `whole`, [layout.padded], with every rank's `part`, [layout.run], which may be its own run of it."""

    @abstractmethod
    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Add up the ranks' buffers, each run on its owner; `buffer` must not be touched until the sum is there."""

    @abstractmethod
    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Arrival:
        """Send a message to every other rank and fill `incoming` with theirs, one by rank; this rank's are empty.

        Both must be kept until it is waited for.
        """

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over ranks, on every rank; in place."""
        if self.ranks.world_size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, on every rank; in place."""
        if self.ranks.world_size > 1:
            dist.broadcast(values, self._global(0), group=self.group)
        return values

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class SingleRank(Collectives):
    """One rank: there is nothing to exchange."""

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Copy the only part."""
        _copy_own(whole, part, layout)
        return Arrived()

    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Return the only sum."""
        return _Reduced(buffer, Arrived())

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Arrival:
        """Exchange nothing."""
        return Arrived()


class NativeCollectives(Collectives):
    """NCCL's all-gather and reduce-scatter, on its own streams.

    They want runs of equal length. Undivided parameters travel in one broadcast or reduction for each owner instead:
    the same bytes, where padding to the longest run would send a bucket of one matrix once for every rank.
    """

    needs_padding = True

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Begin NCCL's all-gather, or a broadcast from each owner."""
        if layout.borders is not None:
            _copy_own(whole, part, layout)
            return _All([dist.broadcast(run, **self._rooted("src", rank)) for rank, run in _filled(whole, layout)])
        work: Arrival = collectives.all_gather(whole, part, group=self.group, async_op=True)
        return work

    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Begin NCCL's reduce-scatter, or a reduction to each owner."""
        if layout.borders is not None:
            work = [dist.reduce(run, **self._rooted("dst", rank)) for rank, run in _filled(buffer, layout)]
            return _Reduced(buffer[layout.own_slice], _All(work), copies=True)
        part = buffer.new_empty(layout.run)
        return _Reduced(part, collectives.reduce_scatter(part, buffer, group=self.group, async_op=True))

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Arrival:
        """Begin NCCL's exchange."""
        work: Arrival = dist.all_to_all(list(incoming), list(outgoing), group=self.group, async_op=True)
        return work

    def _rooted(self, role: str, rank: int) -> dict[str, Any]:
        return {role: self._global(rank), "group": self.group, "async_op": True}


class Messages(Collectives):
    """Messages from rank to rank: each run goes to its owner, who adds up what arrives."""

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> Arrival:
        """Send this rank's run to all others."""
        _copy_own(whole, part, layout)
        runs = _runs(whole, layout)
        return self._swap([runs[self.ranks.rank]] * len(runs), runs, _tag(_GATHER_TAG))

    def reduce_scatter(self, buffer: torch.Tensor, layout: Layout) -> Sum:
        """Send every owner its run."""
        first, last = layout.own
        runs = _runs(buffer, layout)
        received = buffer.new_empty((len(runs) - 1, last - first))
        rows = [*received]
        rows.insert(self.ranks.rank, runs[self.ranks.rank])
        return _MessageSum(buffer, runs[self.ranks.rank], received, self._swap(runs, rows, _tag(_REDUCE_TAG)))

    def all_to_all(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Arrival:
        """Send every rank its message."""
        return self._swap(outgoing, incoming, _tag(_EXCHANGE_TAG))

    def _swap(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], tag: int) -> Arrival:
        """Send every other rank its tensor, and receive theirs in place; nothing is sent that is empty."""
        rank, world = self.ranks.rank, self.ranks.world_size
        work: list[Any] = []
        # Each rank begins with the next one, so that they do not all send to the same.
        for distance in range(1, world):
            to, source = (rank + distance) % world, (rank - distance) % world
            if incoming[source].numel():
                work.append(dist.irecv(incoming[source], self._global(source), self.group, tag))
            if outgoing[to].numel():
                work.append(dist.isend(outgoing[to], self._global(to), self.group, tag))
        return _All(work)


def collectives_for(ranks: Ranks, device: torch.device, group: dist.ProcessGroup | None = None) -> Collectives:
    """Return the collectives that suit the device, between the ranks of a process group, or of all."""
    if ranks.world_size == 1:
        return SingleRank(ranks, group)
    return NativeCollectives(ranks, group) if device.type == "cuda" else Messages(ranks, group)


def collectives_over(name: Group, mesh: Mesh) -> Collectives:
    """Return the collectives between this rank's ranks of a group."""
    ranks = Ranks(rank=mesh.rank(name), world_size=mesh.size(name))
    # A group of this rank alone is one too: None would be all ranks.
    is_all = ranks.world_size == mesh.dims.world_size
    return collectives_for(ranks, mesh.environment.device, None if is_all else mesh.group(name))


def _runs(tensor: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return every rank's run of a tensor that has them all."""
    return [tensor[slice(*layout.bounds(rank))] for rank in range(layout.ranks.world_size)]


def _filled(tensor: torch.Tensor, layout: Layout) -> list[tuple[int, torch.Tensor]]:
    """Return the runs that are not empty, with their owners."""
    return [(rank, run) for rank, run in enumerate(_runs(tensor, layout)) if run.numel()]


def _copy_own(whole: torch.Tensor, part: torch.Tensor, layout: Layout) -> None:
    first, last = layout.own
    own = whole[first:last]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part[: last - first])


class _All:
    def __init__(self, work: list[Any]) -> None:
        self._work = work

    def wait(self) -> None:
        for work in self._work:
            work.wait()


class _Reduced:
    """A sum whose `own` run arrives; `copies` it out of a buffer whose other runs are of no use any more."""

    def __init__(self, own: torch.Tensor, arrival: Arrival, *, copies: bool = False) -> None:
        self._own, self._arrival, self._copies = own, arrival, copies

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        self._arrival.wait()
        return self._own.to(dtype, copy=self._copies)


class _MessageSum:
    def __init__(self, buffer: torch.Tensor, own: torch.Tensor, received: torch.Tensor, arrival: Arrival) -> None:
        self._buffer, self._own, self._received, self._arrival = buffer, own, received, arrival

    def total(self, dtype: torch.dtype) -> torch.Tensor:
        self._arrival.wait()
        if len(self._received) == 1 and self._received.dtype == dtype:
            return self._received[0].add_(self._own)
        # Several 16-bit values are added in fp32 and rounded once.
        wide = dtype if dtype == torch.float64 else torch.float32
        total = self._own.to(wide, copy=True)
        for row in self._received:
            total.add_(row)
        return total.to(dtype)
