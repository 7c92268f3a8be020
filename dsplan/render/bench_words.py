"""Pieces of a benchmark and what they gave, in a few words each."""

from __future__ import annotations

from hardware_db.measurement import Measurement, RateMeasurement
from hardware_db.microbench.point import Point
from hardware_db.units import GB, format_bytes, format_count, format_seconds
from strategies.bench.events import Work


def work_words(work: Work) -> str:
    """`matmul fp32 512x512x512, 2 ranks` or a training run in one line."""
    if not isinstance(work, Point):
        return str(work)
    parts = [work.operation.replace("_", " "), work.dtype, "x".join(str(extent) for extent in work.shape)]
    parts.append(format_bytes(work.size) if work.size else "")
    return f"{' '.join(part for part in parts if part)}, {work.ranks} {'rank' if work.ranks == 1 else 'ranks'}"


def result_words(record: RateMeasurement | Measurement) -> str:
    """What came of it, with the spread of its repeats."""
    if isinstance(record, RateMeasurement):
        return f"{rate_words(record.value, record.unit)}{_spread(record.spread)}"
    if record.outcome != "completed" or record.measured.step_seconds is None:
        return record.outcome.replace("_", " ")
    promised = record.predicted.step_seconds
    beside = "" if promised is None else f", predicted {format_seconds(promised)}"
    return f"{format_seconds(record.measured.step_seconds)} per step{beside}"


def rate_words(value: float, unit: str) -> str:
    """A rate with a unit that keeps three digits: `76.6 GFLOP/s`, `1.4 GB/s`, `170 us`."""
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes/s":
        return f"{value / GB:.3g} GB/s"
    if unit == "FLOP/s":
        return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
    return f"{format_count(value)} {unit}"


def _spread(spread: float | None) -> str:
    return "" if spread is None else f" (samples differ by {spread:.0%})"
