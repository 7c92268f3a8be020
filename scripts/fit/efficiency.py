"""Fits the constants of `planner/timing` to the shipped measurements and prints them beside those in the code.

    python -m scripts.fit.efficiency

Kernels are fitted on every second row of their file and scored on the others. The constants of whole training steps
are fitted to every stated publication, shrunk to what kernels say (`time_constants.py`); `time_accuracy.py` scores such
fits on publications that they have not seen.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardware_db.datasheets import find_device
from planner.cost.timing import efficiency
from planner.cost.timing.efficiency import ATTENTION_BACKWARD, ceilings
from scripts.fit.published_rows import MEASUREMENTS, published_runs
from scripts.fit.time_accuracy import seen_by_a_fit
from scripts.fit.time_constants import SHIPPED_SPREADS, Model, architecture, expected_factors, fitted

SMALLEST_ATTENTION_TFLOP = 0.1
"""Attention products below this run too few blocks to fill the device; they say nothing of its ceiling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A measured matrix product: seconds at the peak, seconds to copy its matrices once, seconds taken."""

    device: str
    at_peak: float
    copying: float
    seconds: float


def products() -> list[Product]:
    """The products of gemm_efficiency.csv, in file order."""
    with (MEASUREMENTS / "gemm_efficiency.csv").open(newline="") as lines:
        return [_product(row) for row in csv.DictReader(lines)]


def _product(row: dict[str, str]) -> Product:
    m, k, n = (int(row[name]) for name in "mkn")
    batch = int(row["batch"])
    device = find_device(row["device"])
    at_peak = 2.0 * batch * m * k * n / (float(row["peak_tflops"]) * 1e12)
    size = 2.0 * batch * (m * k + k * n + m * n)
    bandwidth = (device.memory_bandwidth_bytes_per_s or 0.0) * efficiency.MEMORY_CEILING
    return Product(
        device=device.name, at_peak=at_peak, copying=size / bandwidth, seconds=at_peak / float(row["efficiency"])
    )


def gemm_error(rows: Iterable[Product], ceiling: float, traffic: float) -> float:
    """Median |log(predicted / measured)|."""
    return statistics.median(
        abs(math.log((row.at_peak / ceiling + row.copying * traffic) / row.seconds)) for row in rows
    )


def fit_gemm(rows: Sequence[Product], traffic: float = efficiency.GEMM_TRAFFIC) -> float:
    """The ceiling with the least median error."""
    return min((step / 100 for step in range(40, 101)), key=lambda ceiling: gemm_error(rows, ceiling, traffic))


def fit_traffic(rows: Sequence[Product]) -> float:
    """The traffic factor with the least median error, the ceiling fitted along."""
    return min(
        (step / 20 for step in range(61)),
        key=lambda traffic: gemm_error(rows, fit_gemm(rows, traffic), traffic),
    )


def attention_ceilings() -> dict[str, tuple[float, float]]:
    """By device: the forward's share of the peak and the backward's time over the forward's, medians of long products.

    The file counts causal products in full and 2.5 times that for the backward; half of either is computed.
    """
    by_device: dict[str, dict[str, list[float]]] = {}
    with (MEASUREMENTS / "attention_efficiency.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            width = int(row["heads"]) * (int(row["qk_head_dim"]) + int(row["v_head_dim"]))
            teraflops = 2e-12 * int(row["batch"]) * int(row["seq_len"]) ** 2 * width
            if teraflops >= SMALLEST_ATTENTION_TFLOP:
                by_device.setdefault(row["device"], {}).setdefault(row["op"], []).append(float(row["efficiency"]) / 2)
    ceilings = {}
    for device, shares in by_device.items():
        forward, backward = (statistics.median(shares[name]) for name in ("sdp_fwd", "sdp_bwd"))
        ceilings[device] = forward, 2.5 * forward / backward
    return ceilings


def _kernel_lines() -> Iterable[str]:
    rows = products()
    for device in dict.fromkeys(row.device for row in rows):
        own = [row for row in rows if row.device == device]
        fitted, held_out = own[::2], own[1::2]
        ceiling = fit_gemm(fitted)
        error = gemm_error(held_out, ceiling, efficiency.GEMM_TRAFFIC)
        yield f"GEMM ceiling {device}: {ceiling:.2f}; held-out median error {error:.1%} of {len(held_out)} products"
    own = [row for row in rows if row.device.startswith("A100")]
    yield f"GEMM_TRAFFIC on A100: {fit_traffic(own[::2]):.2f}; code {efficiency.GEMM_TRAFFIC}"
    for device, (forward, backward) in attention_ceilings().items():
        yield f"attention {device}: forward {forward:.2f} of peak, backward {backward:.2f} forwards"
    yield f"  code {efficiency.ATTENTION_CEILING}, backward {ATTENTION_BACKWARD}"


def _step_lines() -> Iterable[str]:
    """The constants of whole steps, fitted to every stated publication, beside those in the code."""
    model = Model(seen_by_a_fit(list(published_runs())))
    fit = fitted(model, SHIPPED_SPREADS)
    moved = dict(zip(fit.names, fit.values, strict=True))
    for kind in sorted({architecture(run.job.cluster) for run in model.runs}):
        cluster = next(run.job.cluster for run in model.runs if architecture(run.job.cluster) == kind)
        in_code, expected = ceilings(cluster.device), expected_factors(cluster)
        products = in_code[0] * expected.compute * math.exp(moved[f"compute {kind}"])
        attention = in_code[1] * expected.attention * math.exp(moved[f"attention {kind}"])
        yield f"{kind}: products {products:.2f}, attention {attention:.2f}; code {in_code[0]} and {in_code[1]}"
    fit = fitted(model)
    for index, name in enumerate(fit.names):
        spread = math.sqrt(fit.covariance[index][index])
        yield f"  {name:32} x {math.exp(fit.values[index]):.2f} of what was expected, give or take {spread:.0%}"


if __name__ == "__main__":
    for line in (*_kernel_lines(), *_step_lines()):
        print(line)
