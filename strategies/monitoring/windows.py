"""The last values of a series, in order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class SortedWindow:
    """The last `size` values, with their median and their highest in a few microseconds."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Add a finite value; the oldest of a full window leaves."""
        if len(self._arrived) == self._size:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    @property
    def highest(self) -> float:
        return self._sorted[-1]
