"""Flat shards: parameters laid end to end in flat buckets, of which every rank owns one run of elements.

A bucket of S elements over N ranks is cut into N runs of ceil(S / N), wherever that falls in its parameters, so that
shapes may divide by nothing. What lies in a rank's run is that rank's *part* of the bucket; the slice of one parameter
in it is a *piece*. Optimizers work on pieces.

Where an optimizer must see whole tensors, each of them has one owner: `owners_of` shares them out, and their buckets
lie in the order of their owners and are cut between parameters, so that the runs are of unequal length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, groupby
from types import MappingProxyType

import torch
from torch import nn

from planner.cost.zero_bucket_sizes import bucket_members, owning_ranks
from strategies.parallel.whole import Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A rank among those that share one copy of the states."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """Range of a parameter in its bucket, in elements."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        """The element after its last."""
        return self.start + self.parameter.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Number of elements, and where each rank's run begins and ends.

    `borders`, [world_size + 1], are where the runs of undivided parameters begin and the last one ends; None for runs
    of equal length.
    """

    elements: int
    ranks: Ranks
    borders: tuple[int, ...] | None = None

    @property
    def run(self) -> int:
        """Elements of the longest run; of equal ones the last may be shorter, or empty."""
        if self.borders is not None:
            return max(stop - start for start, stop in zip(self.borders, self.borders[1:], strict=False))
        return -(-self.elements // self.ranks.world_size)

    @property
    def padded(self) -> int:
        """Elements of a buffer that has a whole run for every rank; runs of unequal length are not padded."""
        return self.run * self.ranks.world_size if self.borders is None else self.elements

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's run and the one after its last."""
        if self.borders is not None:
            return self.borders[rank], self.borders[rank + 1]
        return min(rank * self.run, self.elements), min((rank + 1) * self.run, self.elements)

    @property
    def own(self) -> tuple[int, int]:
        """First element of this rank's run and the one after its last."""
        return self.bounds(self.ranks.rank)

    @property
    def own_slice(self) -> slice:
        """The slice of this rank's run in a buffer of `padded` elements, with its padding."""
        if self.borders is not None:
            return slice(*self.own)
        return slice(self.ranks.rank * self.run, (self.ranks.rank + 1) * self.run)


class Place(Enum):
    """Home of a bucket's master and optimizer states, where they are stepped."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Bucket:
    """Parameters of one dtype side by side, and this rank's part of what belongs to them.

    Attributes:
        slots: the parameters, in the order they lie.
        kind: what they have in common where ranks split the model.
        states_at: where master and optimizer states live.
        trains: whether an optimizer changes them; if not, there is no master.
        whole: all weights with padding, [layout.padded]; where weights are sharded its storage is empty between uses.
        part: this rank's weights, [layout.run]: a view of `whole` where that is kept, else a tensor of its own.
        master: what the optimizer changes, [layout.run]: `part` itself, or a copy in the optimizer's dtype.
        gradient: the sum over ranks of this rank's run, [layout.run] or without its padding; None until it is reduced.
    """

    def __init__(
        self, slots: Sequence[Slot], ranks: Ranks, dtype: torch.dtype, borders: tuple[int, ...] | None = None
    ) -> None:
        self.slots = tuple(slots)
        self.layout = Layout(elements=slots[-1].stop, ranks=ranks, borders=borders)
        self.dtype = dtype
        self.kind = Kind()
        self.trains = True
        self.states_at = Place.DEVICE
        self.whole: torch.Tensor
        self.part: torch.Tensor
        self.master: torch.Tensor
        self.gradient: torch.Tensor | None = None

    @property
    def is_divided(self) -> bool:
        """True if runs are cut inside parameters; if not, each parameter is one rank's."""
        return self.layout.borders is None

    @property
    def is_single(self) -> bool:
        """True if one parameter fills the bucket, so that its gradient is the bucket's."""
        return len(self.slots) == 1

    def own_range(self, slot: Slot) -> tuple[int, int]:
        """Return where in this rank's run a parameter's piece begins and ends; empty where they are equal."""
        first, last = self.layout.own
        start, stop = max(slot.start, first), min(slot.stop, last)
        return (start - first, stop - first) if start < stop else (0, 0)

    def owns(self, slot: Slot) -> bool:
        """Return whether any of a parameter is in this rank's run."""
        start, stop = self.own_range(slot)
        return start < stop

    def own_start(self, slot: Slot) -> int:
        """Return where this rank's piece begins, counted in the parameter."""
        return max(0, self.layout.own[0] - slot.start)

    def place(self, whole: torch.Tensor) -> None:
        """Make the parameters views of `whole`."""
        for slot in self.slots:
            slot.parameter.data = whole[slot.start : slot.stop].view(slot.parameter.shape)


Named = tuple[str, nn.Parameter]
Owners = Mapping[nn.Parameter, int]


def owners_of(undivided: Iterable[nn.Parameter], world_size: int) -> dict[nn.Parameter, int]:
    """Return the rank that owns each parameter which must not be divided."""
    parameters = list(dict.fromkeys(undivided))
    return dict(zip(parameters, owning_ranks([tensor.numel() for tensor in parameters], world_size), strict=True))


def buckets_of(
    named: Iterable[Named],
    ranks: Ranks,
    dtype_of: Mapping[nn.Parameter, torch.dtype],
    limit: int,
    owners: Owners = MappingProxyType({}),
) -> list[Bucket]:
    """Return buckets of at most `limit` elements, in the order of the parameters (see `bucket_members`).

    Parameters that have an owner share no bucket with those that are divided.
    """
    members = list(named)
    divided = [member for member in members if member[1] not in owners]
    undivided = [member for member in members if member[1] in owners]
    buckets: list[Bucket] = []
    for kind in (divided, undivided):
        for dtype, alike in groupby(kind, key=lambda item: dtype_of[item[1]]):
            group = list(alike)
            bucketed = bucket_members([parameter.numel() for _, parameter in group], limit)
            buckets += [_bucket([group[index] for index in indices], ranks, dtype, owners) for indices in bucketed]
    return buckets


def _bucket(members: list[Named], ranks: Ranks, dtype: torch.dtype, owners: Owners) -> Bucket:
    """Return one bucket; undivided parameters lie in the order of their owners."""
    is_divided = members[0][1] not in owners
    ordered = members if is_divided else sorted(members, key=lambda member: owners[member[1]])
    starts = accumulate((parameter.numel() for _, parameter in ordered), initial=0)
    slots = [Slot(name=name, parameter=p, start=start) for start, (name, p) in zip(starts, ordered, strict=False)]
    if is_divided:
        return Bucket(slots, ranks, dtype)
    owned = [0] * ranks.world_size
    for _, parameter in ordered:
        owned[owners[parameter]] += parameter.numel()
    return Bucket(slots, ranks, dtype, tuple(accumulate(owned, initial=0)))
