"""Partition: parameters laid end to end in flat buckets, of which every rank owns one equal run of elements.

A bucket of S elements over N ranks is cut into N runs of ceil(S / N), wherever that falls in its parameters, so that
shapes may divide by nothing. What lies in a rank's run is that rank's *part* of the bucket; the slice of one parameter
in it is a *piece*. Optimizers work on pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This rank among those that share one copy of the states."""

    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """Where a parameter lies in its bucket, in elements."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How many elements there are, and where each rank's run begins and ends."""

    elements: int
    ranks: Ranks

    @property
    def run(self) -> int:
        """Elements of every rank's run; the last ones may be shorter, or empty."""
        return -(-self.elements // self.ranks.world_size)

    @property
    def padded(self) -> int:
        """Elements of a buffer that has a whole run for every rank."""
        return self.run * self.ranks.world_size

    def bounds(self, rank: int) -> tuple[int, int]:
        """First element of a rank's run and the one after its last."""
        return min(rank * self.run, self.elements), min((rank + 1) * self.run, self.elements)

    @property
    def own(self) -> tuple[int, int]:
        return self.bounds(self.ranks.rank)


class Bucket:
    """Parameters of one dtype side by side, and this rank's part of what belongs to them.

    Attributes:
        slots: the parameters, in the order they lie.
        trains: whether an optimizer changes them; if not, there is no master.
        whole: all weights with padding, [layout.padded]; where weights are sharded its storage is empty between uses.
        part: this rank's weights, [layout.run]: a view of `whole` where that is kept, else a tensor of its own.
        master: what the optimizer changes, [layout.run]: `part` itself, or a copy in the optimizer's dtype.
        gradient: the sum over ranks of this rank's run, [layout.run] or without its padding; None until it is reduced.
    """

    def __init__(self, slots: Sequence[Slot], ranks: Ranks, dtype: torch.dtype) -> None:
        self.slots = tuple(slots)
        self.layout = Layout(elements=slots[-1].stop, ranks=ranks)
        self.dtype = dtype
        self.trains = True
        self.whole: torch.Tensor
        self.part: torch.Tensor
        self.master: torch.Tensor
        self.gradient: torch.Tensor | None = None

    @property
    def is_single(self) -> bool:
        """Whether one parameter fills the bucket, so that its gradient is the bucket's."""
        return len(self.slots) == 1

    def own_range(self, slot: Slot) -> tuple[int, int]:
        """The piece of a parameter in this rank's run: its first element and the one after its last, counted in the
        run; empty where they are equal."""
        first, last = self.layout.own
        start, stop = max(slot.start, first), min(slot.stop, last)
        return (start - first, stop - first) if start < stop else (0, 0)

    def own_start(self, slot: Slot) -> int:
        """Where this rank's piece begins, counted in the parameter."""
        return max(0, self.layout.own[0] - slot.start)

    def place(self, whole: torch.Tensor) -> None:
        """Make the parameters views of `whole`."""
        for slot in self.slots:
            slot.parameter.data = whole[slot.start : slot.stop].view(slot.parameter.shape)


def buckets_of(
    named: Iterable[tuple[str, nn.Parameter]], ranks: Ranks, dtype_of: dict[nn.Parameter, torch.dtype], limit: int
) -> list[Bucket]:
    """Buckets of at most `limit` elements, in the order of the parameters; a larger parameter has one to itself.

    A parameter of half the limit or more is alone too: its gradient then travels as it is, without a copy.
    """
    made: list[Bucket] = []
    for dtype, members in groupby(named, key=lambda item: dtype_of[item[1]]):
        open_slots: list[Slot] = []
        for name, parameter in members:
            alone = 2 * parameter.numel() >= limit
            filled = open_slots[-1].stop if open_slots else 0
            if alone:
                made.append(Bucket([Slot(name=name, parameter=parameter, start=0)], ranks, dtype))
                continue
            if filled + parameter.numel() > limit:
                made.append(Bucket(open_slots, ranks, dtype))
                open_slots, filled = [], 0
            open_slots.append(Slot(name=name, parameter=parameter, start=filled))
        if open_slots:
            made.append(Bucket(open_slots, ranks, dtype))
    return made
