"""Fits the constants of `planner/timing` to the shipped measurements and prints them beside those in the code.

    python scripts/fit_efficiency.py

Kernels are fitted on every second row of their file and scored on the others; the constants of whole training steps on
the models named in FITTED_MODELS and scored on all other models. "Held out" concerns these constants alone: what an
Implementation skips or fuses was chosen with every row in sight, those of UNTOUCHED excepted.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from check_published import Scored, scored
from published_rows import MEASUREMENTS, PublishedRun, published_runs

from hardware_db.datasheets import find_device
from planner.timing import efficiency, implementation
from planner.timing.compute import ATTENTION_BACKWARD

FITTED_MODELS = frozenset({"mpt-350m", "mpt-1b", "mpt-7b", "mpt-30b", "gpt 1024x12", "gpt 1024x20"})
UNTOUCHED = "llmfoundry_2023_a100_80"
"""Scored once when the model was finished; nothing was chosen or fitted on these rows."""

LONG_SEQUENCE = 8192

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
    found: dict[str, dict[str, list[float]]] = {}
    with (MEASUREMENTS / "attention_efficiency.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            width = int(row["heads"]) * (int(row["qk_head_dim"]) + int(row["v_head_dim"]))
            teraflops = 2e-12 * int(row["batch"]) * int(row["seq_len"]) ** 2 * width
            if teraflops >= SMALLEST_ATTENTION_TFLOP:
                found.setdefault(row["device"], {}).setdefault(row["op"], []).append(float(row["efficiency"]) / 2)
    ceilings = {}
    for device, shares in found.items():
        forward, backward = (statistics.median(shares[name]) for name in ("sdp_fwd", "sdp_bwd"))
        ceilings[device] = forward, 2.5 * forward / backward
    return ceilings


def step_error(rows: Iterable[Scored]) -> float:
    return statistics.median(abs(math.log(row.ratio)) for row in rows)


def fit_table(table: dict[str, float], key: str, grid: Iterable[float], runs: Sequence[PublishedRun]) -> float:
    """The value of `table[key]` that leaves the least median error; the table is left as it was."""
    before = table[key]

    def error(value: float) -> float:
        table[key] = value
        return step_error(scored(runs))

    try:
        return min(grid, key=error)
    finally:
        table[key] = before


def fit_host(runs: Sequence[PublishedRun]) -> float:
    """Host seconds of one block's forward, from runs of small models."""

    def error(value: float) -> float:
        return step_error(scored(replace(run, code=replace(run.code, block_host_seconds=value)) for run in runs))

    return min((step * 5e-5 for step in range(6, 31)), key=error)


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
    runs = list(published_runs())
    fitted = [run for run in runs if run.model in FITTED_MODELS and run.source != UNTOUCHED]
    clean = [run for run in runs if run.source == UNTOUCHED]
    rest = [run for run in runs if run.model not in FITTED_MODELS and run.source != UNTOUCHED]
    grid = [step / 100 for step in range(50, 100, 2)]
    choices: list[tuple[str, str, Callable[[PublishedRun], bool]]] = [
        ("ampere SXM4", "A100", lambda run: run.source.startswith("llmfoundry_a100")),
        ("hopper", "H100", lambda run: run.source.startswith("llmfoundry_h100")),
    ]
    for key, device, belongs in choices:
        value = fit_table(efficiency.GEMM_CEILING, key, grid, [run for run in fitted if belongs(run)])
        others = [run for run in rest if device in run.job.cluster.device.name]
        yield f"GEMM ceiling {key}: {value:.2f}; code {efficiency.GEMM_CEILING[key]}; {len(others)} held-out runs"
    long = [run for run in fitted if "h100" in run.source and run.job.configuration.sequence_length >= LONG_SEQUENCE]
    attention = fit_table(efficiency.ATTENTION_CEILING, "hopper", [step / 100 for step in range(20, 70, 2)], long)
    in_code = efficiency.ATTENTION_CEILING["hopper"]
    yield f"attention ceiling hopper: {attention:.2f} on {len(long)} runs; code {in_code}"
    small = [run for run in fitted if run.source.startswith("vtrain")]
    host = implementation.TRANSFORMERS.block_host_seconds
    yield f"block_host_seconds: {fit_host(small):.2e}; code {host:.2e}"
    for name, part in (("fitted", fitted), ("held out", rest), ("untouched", clean)):
        for prefix in ("llmfoundry", "torchtitan", "vtrain", "fms", "internevo", "bigscience"):
            own = [row for row in scored(part) if row.run.source.startswith(prefix)]
            if own:
                yield f"{name:9} {prefix:11} {len(own):4} runs, median error {step_error(own):.1%}"


if __name__ == "__main__":
    for line in (*_kernel_lines(), *_step_lines()):
        print(line)
