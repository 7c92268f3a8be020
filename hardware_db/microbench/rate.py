"""Rate: one figure of a micro-benchmark, before it is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """`operation` ran at `value` `unit`. The fields mean what they mean in
    `hardware_db.measurement.RateMeasurement`."""

    operation: str
    value: float
    unit: str
    dtype: str = ""
    size: int | None = None
    ranks: int = 1
