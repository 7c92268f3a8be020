"""Small pictures of text: lines of blocks that rise and fall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"
_LEVELS = "_.-=*#"
"""The same for terminals without Unicode."""
_ALIKE = 1e-9


def sparkline(values: Sequence[float | None], width: int, *, unicode: bool = True) -> str:
    """Values as at most `width` characters, each the mean of as many; a gap where there is none or no finite one.

    The lowest is the lowest character and the highest the highest; values that are all alike lie in the middle.
    """
    levels = _BLOCKS if unicode else _LEVELS
    means = [_mean(part) for part in _parts(values, width)]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    return "".join(" " if mean is None else levels[_level(mean, low, high, len(levels))] for mean in means)


def _parts(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    count = min(len(values), max(width, 1))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count else []
    return [values[start:end] for start, end in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _level(value: float, low: float, high: float, levels: int) -> int:
    # Means of equal values differ in their last digit.
    if math.isclose(high, low, rel_tol=_ALIKE):
        return (levels - 1) // 2
    return round((value - low) / (high - low) * (levels - 1))
