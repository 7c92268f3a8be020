"""Stored micro-benchmarks -> the Rates that the cost model uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hardware_db.measurement import RateMeasurement
from planner import vocabulary as words
from planner.cluster import Rates

# The type matrix products run in under each precision; fp32 autocast does not exist.
_COMPUTE_DTYPE: Mapping[str, str] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-pure": "bf16"}


def rates_from_measurements(
    measurements: Iterable[RateMeasurement], *, ranks: int, precision: words.Precision
) -> Rates:
    """The newest rates of a machine with `ranks` processes at work; None for each kind never measured.

    `measurements` come newest first. Matrix products are those of the dtype that `precision` computes in.
    """
    newest: dict[tuple[str, str], float] = {}
    for rate in measurements:
        if rate.ranks == ranks:
            newest.setdefault((rate.operation, rate.dtype), rate.value)
    return Rates(
        matmul_flops=newest.get(("matmul", _COMPUTE_DTYPE[precision])),
        memory_bytes_per_s=newest.get(("memory", "")),
        host_link_bytes_per_s=newest.get(("host_to_device", "")),
        collective_bytes_per_s=newest.get(("all_reduce", "fp32")),
        collective_latency_s=newest.get(("all_reduce_latency", "fp32")),
        cpu_optimizer_parameters_per_s=newest.get(("cpu_adamw", "fp32")),
    )
