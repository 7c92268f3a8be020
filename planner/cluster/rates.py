"""Stored micro-benchmarks -> the Rates that the cost model uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hardware_db.measurement import RateMeasurement
from planner import vocabulary as words
from planner.cost.timing.collectives import COLLECTIVES, crossings
from planner.types.cluster import Curve, Rates, curve_of

# The type matrix products run in under each precision; fp8 and fp4 are priced from bf16's.
_COMPUTE_DTYPE: Mapping[words.Precision, str] = {
    **dict.fromkeys(words.PRECISIONS, "bf16"),
    "fp32": "fp32",
    "fp16": "fp16",
}

_ATTENTION_BACKWARD_WORK = 2.5
"""Operations of attention's backward over its forward's, as `dsplan bench` counts them: five products for two."""


def rates_from_measurements(
    measurements: Iterable[RateMeasurement], *, ranks: int, precision: words.Precision
) -> Rates:
    """Return the newest rates of a machine with `ranks` processes at work; None for each kind never measured.

    `measurements` come newest first. Matrix products and attention are those of the dtype that `precision` computes in;
    collectives are kept for every number of ranks that was measured. On a CPU only rates of `ranks` processes count,
    which share its cores; a GPU is a rank's own, and any number answers where `ranks` was not measured.
    """
    every = tuple(measurements)
    at_work = _Points(every, ranks, _COMPUTE_DTYPE[precision])
    launches = at_work.of("launch")
    return Rates(
        matmul=at_work.products("matmul"),
        matmul_backward=at_work.products("matmul_backward"),
        attention=at_work.attention("attention", 1.0),
        attention_backward=at_work.attention("attention_backward", _ATTENTION_BACKWARD_WORK),
        memory=at_work.bytes_moved("memory"),
        clone=at_work.bytes_moved("clone"),
        elementwise=at_work.bytes_moved("elementwise"),
        dropout=at_work.bytes_moved("dropout"),
        launch_seconds=launches[0].value if launches else None,
        host_to_device=at_work.per_size("host_to_device"),
        device_to_host=at_work.per_size("device_to_host"),
        collectives=_collectives(every),
        cpu_optimizer=at_work.per_size("cpu_adamw", bytes_each=4),
        cpu_optimizer_fused=at_work.per_size("cpu_adamw_fused", bytes_each=4),
        disk_read=at_work.per_size("disk_read"),
        disk_write=at_work.per_size("disk_write"),
    )


class _Points:
    """The measurements of one number of ranks, read as points of (work, seconds)."""

    def __init__(self, measurements: tuple[RateMeasurement, ...], ranks: int, dtype: str) -> None:
        self._measurements = measurements
        self._ranks = ranks
        self._dtype = dtype

    def of(self, operation: str) -> list[RateMeasurement]:
        rows = [rate for rate in self._measurements if rate.operation == operation and rate.value > 0]
        own = [rate for rate in rows if rate.ranks == self._ranks]
        return own or [rate for rate in rows if rate.fingerprint.machine.device]

    def _typed(self, operation: str) -> list[RateMeasurement]:
        return [rate for rate in self.of(operation) if rate.dtype == self._dtype]

    def products(self, operation: str) -> Curve | None:
        """Return the curve of products of shape (m, k, n), or of a square's edge, which older rows keep as `size`."""
        flops = ((2.0 * _extents(rate), rate.value) for rate in self._typed(operation))
        return curve_of((work, work / rate) for work, rate in flops)

    def attention(self, operation: str, over_forward: float) -> Curve | None:
        """Work is the forward's operations, 4 b h s^2 d of shape (b, h, s, d)."""
        rows = [rate for rate in self._typed(operation) if len(rate.shape) == 4]
        forward = ((4.0 * b * h * s * s * d, rate.value) for rate in rows for b, h, s, d in [rate.shape])
        return curve_of((work, work * over_forward / rate) for work, rate in forward)

    def bytes_moved(self, operation: str) -> Curve | None:
        """Work is bytes read and written, twice the tensor's `size`; every dtype counts, a byte being a byte."""
        return curve_of((2.0 * rate.size, 2.0 * rate.size / rate.value) for rate in self.of(operation) if rate.size)

    def per_size(self, operation: str, *, bytes_each: int = 1) -> Curve | None:
        """Work is `size`, in units of `bytes_each`."""
        sized = ((rate.size / bytes_each, rate.value) for rate in self.of(operation) if rate.size)
        return curve_of((work, work / rate) for work, rate in sized)


def _extents(rate: RateMeasurement) -> float:
    if len(rate.shape) == 3:
        m, k, n = rate.shape
        return float(m) * k * n
    return float(rate.size or 0) ** 3


def _collectives(measurements: tuple[RateMeasurement, ...]) -> dict[tuple[str, int], Curve]:
    """Seconds over the bytes of the whole tensor, from bus bandwidths as nccl-tests defines them."""
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for rate in measurements:
        if rate.ranks < 2 or not rate.size or not rate.value:
            continue
        if rate.operation == "all_reduce_latency":
            points.setdefault(("all_reduce", rate.ranks), []).append((float(rate.size), rate.value))
        elif rate.operation in COLLECTIVES:
            seconds = crossings(rate.operation, rate.ranks) * rate.size / rate.value
            points.setdefault((rate.operation, rate.ranks), []).append((float(rate.size), seconds))
    return {key: curve for key, pairs in points.items() if (curve := curve_of(pairs))}
