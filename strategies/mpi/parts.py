"""Part: the piece of an array that this rank holds, so that a checkpoint can put the array together from all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strategies.errors import CannotRun
from strategies.mpi.arrays import Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A piece of an array of `shape`.

    Args:
        values: the piece.
        shape: of the whole array.
        start: where the piece begins: one index per dimension for a box, or one number for a run of the flattened array
            (`values` is then flat).

    Raises:
        CannotRun: the piece does not lie within the whole.
    """

    values: Array
    shape: tuple[int, ...]
    start: tuple[int, ...] | int

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray):
            raise CannotRun(f"a part's values are of type {type(self.values).__name__}; they must be a numpy array")
        size = (int(np.prod(self.shape, dtype=np.int64)),) if isinstance(self.start, int) else self.shape
        start = (self.start,) if isinstance(self.start, int) else self.start
        inside = len(start) == self.values.ndim == len(size) and all(
            min(low, whole - low - long) >= 0 for low, long, whole in zip(start, self.values.shape, size, strict=True)
        )
        if not inside:
            raise CannotRun(
                f"a part of shape {list(self.values.shape)} at {self.start} lies outside of an array of shape"
                f" {list(self.shape)}"
            )

    @property
    def region(self) -> Region:
        """Where it lies."""
        return Region(start=self.start, shape=self.values.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where a piece lies in its whole; `start` as in `Part`, `shape` the piece's own."""

    start: tuple[int, ...] | int
    shape: tuple[int, ...]

    def within(self, whole: Array) -> Array:
        """The piece of a whole array, as a view where the whole is contiguous."""
        if isinstance(self.start, int):
            return whole.reshape(-1)[self.start : self.start + self.shape[0]]
        view: Array = whole[self._slices()] if self.shape else whole.reshape(())
        return view

    def copy_to(self, whole: Array, values: Array) -> None:
        """Write the piece into a contiguous whole array."""
        self.within(whole)[...] = values

    def overlaps(self, other: Region) -> bool:
        """Whether both have elements in common; True where that takes more than comparing bounds to know."""
        if isinstance(self.start, int) != isinstance(other.start, int):
            return True
        mine, others = self._slices(), other._slices()
        return all(one.start < two.stop and two.start < one.stop for one, two in zip(mine, others, strict=True))

    def _slices(self) -> tuple[slice, ...]:
        start = (self.start,) if isinstance(self.start, int) else self.start
        return tuple(slice(low, low + long) for low, long in zip(start, self.shape, strict=True))
