"""Runs of leaves side by side in buffers of a limited size, so that many small arrays make few messages.

`whole_buckets` cuts leaves as they lie. `divided_buckets` cuts them so that each buffer holds a run for every rank, one
rank after the other, which is what reduce-scatter and all-gather need. Rank r of N owns elements n·r/N to n·(r+1)/N
(rounded down) of a leaf of n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsplan.mpi.arrays import Array, Form, Path, Tree, form_of, leaves, name_of, values_of
from dsplan.mpi.communicator import Communicator
from strategies.errors import CannotRun

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
    def elements(self) -> slice:
        """Elements of the bucket that the run covers."""
        return slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One message: its dtype and runs. `counts` has the number of elements per rank, or only the total."""

    dtype: np.dtype[Any]
    runs: tuple[Run, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements of all leaves together."""
        return sum(self.counts)

    def filled(self, flat: Mapping[int, Array | None]) -> Array:
        """Return the buffer with the leaves' values, cast to `dtype`; zeros where a leaf is None."""
        buffer = np.empty(self.count, dtype=self.dtype)
        for run in self.runs:
            leaf = flat[run.leaf]
            buffer[run.elements] = 0 if leaf is None else leaf[run.start : run.stop]
        return buffer

    def spread(self, buffer: Array, flat: Sequence[Array]) -> None:
        """Write the buffer's values to the leaves, cast to theirs."""
        for run in self.runs:
            flat[run.leaf][run.start : run.stop] = buffer[run.elements]

    def runs_of(self, rank: int) -> Iterator[Run]:
        """Return the runs of a rank's part, placed from the part's beginning."""
        begin = sum(self.counts[:rank])
        end = begin + self.counts[rank]
        for run in self.runs:
            if begin <= run.at < end:
                yield Run(leaf=run.leaf, start=run.start, stop=run.stop, at=run.at - begin)


def bounds(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the elements of a leaf of `count` that are a rank's."""
    return count * rank // ranks, count * (rank + 1) // ranks


def checked_bucket_bytes(value: int) -> int:
    """Return the size of buckets in bytes.

    Raises:
        CannotRun: messages of that size cannot be sent.
    """
    if not _SMALLEST <= value <= _LARGEST:
        raise CannotRun(f"bucket_bytes is {value}; it must be from {_SMALLEST} to {_LARGEST}")
    return value


def whole_buckets(counts: Sequence[int], dtypes: Sequence[np.dtype[Any]], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes over leaves of these element counts and dtypes, one dtype each."""
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        chosen = [(leaf, counts[leaf]) for leaf in range(len(counts)) if dtypes[leaf] == dtype]
        for group in _groups(chosen, max(1, limit // dtype.itemsize)):
            runs, at = [], 0
            for leaf, low, high in group:
                runs.append(Run(leaf=leaf, start=low, stop=high, at=at))
                at += high - low
            buckets.append(Bucket(dtype=dtype, runs=tuple(runs), counts=(at,)))
    return buckets


def divided_buckets(counts: Sequence[int], dtypes: Sequence[np.dtype[Any]], limit: int, ranks: int) -> list[Bucket]:
    """Buckets of about `limit` bytes in which every rank's runs of some leaves lie together."""
    buckets: list[Bucket] = []
    for dtype in dict.fromkeys(dtypes):
        longest = [-(-count // ranks) for count in counts]
        chosen = [(leaf, longest[leaf]) for leaf in range(len(counts)) if dtypes[leaf] == dtype]
        for group in _groups(chosen, max(1, limit // (dtype.itemsize * ranks))):
            buckets.append(_divided(group, counts, dtype, ranks))
    return buckets


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


# All ranks agree on the leaves of a tree before the first message.


FormsByName = dict[str, Form | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A leaf. `value` is None if this rank has none, `form` if no rank has one; `absent` are the ranks without."""

    path: Path
    value: Any
    form: Form | None
    absent: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """The path as messages write it."""
        return name_of(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """An exchange over ranks: its name for messages, what else must be the same, and checks of arguments and leaves."""

    action: str
    also: str = ""
    check: Callable[[], None] = lambda: None
    require: Callable[[Path, Form], None] = lambda _path, _form: None


def common_leaves(communicator: Communicator, tree: Tree, exchange: Exchange) -> list[Leaf]:
    """Return the leaves in the order of all ranks.

    A leaf may be None on some ranks: a gradient that was not computed there.

    Raises:
        CannotRun: names, shapes or dtypes differ between ranks, or a leaf cannot be sent; all ranks raise.
    """
    own, same = communicator.compare(
        lambda: _described(tree, exchange), lambda own_leaves: _words(own_leaves, exchange)
    )
    if same:
        return own
    forms = communicator.all_gather_objects({leaf.name: _without_device(leaf.form) for leaf in own})
    words = communicator.all_gather_objects(_words(own, exchange))
    if not _differ_in_absence_only(forms, [each[0] for each in words]):
        raise communicator.disagreement(exchange.action, words)
    device = next((leaf.form.device for leaf in own if leaf.form and leaf.form.device is not None), "cpu")
    return [_completed(leaf, forms, device) for leaf in own]


class FlatLeaves:
    """Leaves as flat arrays in host memory, [count], made when a bucket needs them and dropped with it."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._made: dict[int, Array | None] = {}

    def of(self, bucket: Bucket) -> dict[int, Array | None]:
        """Return the leaves of a bucket; a leaf is None if this rank has no value."""
        needed = dict.fromkeys(run.leaf for run in bucket.runs)
        self._made = {leaf: self._made[leaf] if leaf in self._made else self._flat(leaf) for leaf in needed}
        return self._made

    def _flat(self, leaf: int) -> Array | None:
        value = self._values[leaf]
        return None if value is None else values_of(value).reshape(-1)


def _described(tree: Tree, exchange: Exchange) -> list[Leaf]:
    exchange.check()
    described = []
    for path, value in leaves(tree).items():
        form = None if value is None else form_of(value, name_of(path))
        if form is not None:
            exchange.require(path, form)
        described.append(Leaf(path=path, value=value, form=form))
    return described


def _words(described: Sequence[Leaf], exchange: Exchange) -> list[str]:
    return [exchange.also, *(f"{leaf.name} {'absent' if leaf.form is None else leaf.form}" for leaf in described)]


def _without_device(form: Form | None) -> Form | None:
    return None if form is None else replace(form, device=None)


def _differ_in_absence_only(forms: Sequence[FormsByName], also: Sequence[str]) -> bool:
    if len(set(also)) > 1 or any(list(form) != list(forms[0]) for form in forms):
        return False
    return all(len({str(form[name]) for form in forms if form[name] is not None}) <= 1 for name in forms[0])


def _completed(leaf: Leaf, forms: Sequence[FormsByName], device: Any) -> Leaf:
    """Return a leaf with the form that other ranks have, where this rank has no value."""
    absent = frozenset(rank for rank, words in enumerate(forms) if words[leaf.name] is None)
    if leaf.form is not None:
        return replace(leaf, absent=absent)
    there = next((words[leaf.name] for words in forms if words[leaf.name] is not None), None)
    if there is not None and there.kind == "tensor":
        there = replace(there, device=device)
    return replace(leaf, form=there, absent=absent)


def require_summable(path: Path, form: Form) -> None:
    """Check that a mean over ranks means something.

    Raises:
        CannotRun: a leaf is of whole numbers or truth values.
    """
    if not form.is_summable:
        raise CannotRun(f"{name_of(path)!r} is of {form.word}; gradients are floating-point or complex")
