"""Point: one thing that a benchmark measures. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """`operation` on tensors of `dtype` with `size` bytes or of `shape`, while `ranks` processes do the same.

    The fields mean what they mean in `hardware_db.measurement.RateMeasurement`; two equal points are the same
    measurement. `size` is 0 where the operation has none.
    """

    operation: str
    dtype: str = ""
    size: int = 0
    shape: tuple[int, ...] = ()
    ranks: int = 1
