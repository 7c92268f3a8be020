"""The rate that a micro-benchmark measured, and the record it is stored as. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import RateMeasurement, new_id, utc_now

# The types that points name.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# The points that a benchmark measures.


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """`point` ran at `value` `unit`, the median of `repeats` samples that differ by up to `spread` (max / min - 1)."""

    point: Point
    value: float
    unit: str
    repeats: int = 1
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a point cannot be measured here, in one line."""

    reason: str


def as_measurement(rate: Rate, fingerprint: Fingerprint, source: str) -> RateMeasurement:
    """The record of a rate that was measured just now."""
    point = rate.point
    return RateMeasurement(
        id=new_id(),
        created_at=utc_now(),
        operation=point.operation,
        value=rate.value,
        unit=rate.unit,
        dtype=point.dtype,
        size=point.size or None,
        shape=point.shape,
        ranks=point.ranks,
        repeats=rate.repeats,
        spread=rate.spread,
        fingerprint=fingerprint,
        source=source,
    )


def point_of(record: RateMeasurement) -> Point:
    """The point that a record measured."""
    return Point(
        operation=record.operation, dtype=record.dtype, size=record.size or 0, shape=record.shape, ranks=record.ranks
    )
