"""Runs of leaves side by side in buffers of a limited size, so that many small arrays make few messages.

`whole_buckets` cuts leaves as they lie. `divided_buckets` cuts them so that each buffer holds a run for every rank, one
rank after the other, which is what reduce-scatter and all-gather need. Rank r of N owns elements n·r/N to n·(r+1)/N
(rounded down) of a leaf of n elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.errors import CannotRun
from strategies.mpi.arrays import Array

BUCKET_BYTES = 8 << 20
_SMALLEST, _LARGEST = 1 << 10, 1 << 30  # MPI counts elements in 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Elements `start` to `stop` of a flat leaf, and where they begin in the bucket."""

    leaf: int
    start: int
    stop: int
    at: int

    @property
    def place(self) -> slice:
        """Where the run lies in the bucket."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One message: its dtype and runs. `counts` has the number of elements per rank, or only the total."""

    dtype: np.dtype[Any]
    runs: tuple[Run, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.counts)

    def filled(self, flat: Mapping[int, Array | None]) -> Array:
        """The buffer with the leaves' values, cast to `dtype`; zeros where a leaf is None."""
        buffer = np.empty(self.count, dtype=self.dtype)
        for run in self.runs:
            leaf = flat[run.leaf]
            buffer[run.place] = 0 if leaf is None else leaf[run.start : run.stop]
        return buffer

    def spread(self, buffer: Array, flat: Sequence[Array]) -> None:
        """Write the buffer's values to the leaves, cast to theirs."""
        for run in self.runs:
            flat[run.leaf][run.start : run.stop] = buffer[run.place]

    def runs_of(self, rank: int) -> Iterator[Run]:
        """The runs of a rank's part, placed from the part's beginning."""
        begin = sum(self.counts[:rank])
        end = begin + self.counts[rank]
        for run in self.runs:
            if begin <= run.at < end:
                yield Run(leaf=run.leaf, start=run.start, stop=run.stop, at=run.at - begin)


def bounds(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements of a leaf of `count` that are a rank's."""
    return count * rank // ranks, count * (rank + 1) // ranks


def checked_bucket_bytes(value: int) -> int:
    """
    Raises:
        CannotRun: messages of that size cannot be sent.
    """
    if not _SMALLEST <= value <= _LARGEST:
        raise CannotRun(f"bucket_bytes is {value}; it must be from {_SMALLEST} to {_LARGEST}")
    return value


def whole_buckets(counts: Sequence[int], dtypes: Sequence[np.dtype[Any]], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes over leaves of these element counts and dtypes, one dtype each."""
    found: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        chosen = [(leaf, counts[leaf]) for leaf in range(len(counts)) if dtypes[leaf] == dtype]
        for group in _groups(chosen, max(1, limit // dtype.itemsize)):
            runs, at = [], 0
            for leaf, low, high in group:
                runs.append(Run(leaf=leaf, start=low, stop=high, at=at))
                at += high - low
            found.append(Bucket(dtype=dtype, runs=tuple(runs), counts=(at,)))
    return found


def divided_buckets(counts: Sequence[int], dtypes: Sequence[np.dtype[Any]], limit: int, ranks: int) -> list[Bucket]:
    """Buckets of about `limit` bytes in which every rank's runs of some leaves lie together."""
    found: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        longest = [-(-count // ranks) for count in counts]
        chosen = [(leaf, longest[leaf]) for leaf in range(len(counts)) if dtypes[leaf] == dtype]
        for group in _groups(chosen, max(1, limit // (dtype.itemsize * ranks))):
            found.append(_divided(group, counts, dtype, ranks))
    return found


def _divided(group: Sequence[tuple[int, int, int]], counts: Sequence[int], dtype: np.dtype[Any], ranks: int) -> Bucket:
    runs: list[Run] = []
    sizes: list[int] = []
    at = 0
    for rank in range(ranks):
        before = at
        for leaf, low, high in group:
            begin, end = bounds(counts[leaf], ranks, rank)
            start, stop = min(begin + low, end), min(begin + high, end)
            if stop > start:
                runs.append(Run(leaf=leaf, start=start, stop=stop, at=at))
                at += stop - start
        sizes.append(at - before)
    return Bucket(dtype=dtype, runs=tuple(runs), counts=tuple(sizes))


def _groups(leaves: Sequence[tuple[int, int]], room: int) -> Iterator[list[tuple[int, int, int]]]:
    """(leaf, from, to) in order, in groups of at most `room` elements; leaves without elements are passed over."""
    group: list[tuple[int, int, int]] = []
    free = room
    for leaf, count in leaves:
        low = 0
        while low < count:
            high = min(count, low + free)
            group.append((leaf, low, high))
            free -= high - low
            low = high
            if free == 0:
                yield group
                group, free = [], room
    if group:
        yield group
