"""The metrics of a run: the file each rank writes, its reader, and the figures that follow. No torch.

`metrics-rank{N}.jsonl` in the run directory holds one JSON object per line, in this order,

    {"event": "plan", ...}                         rank 0 only, when the engine made the plan itself
    {"event": "step", "step": i, "loss": mean over this rank's micro-batches, "seconds": since the last step ended,
     "samples": ..., "tokens": ... of this rank, "allocated_bytes": ..., "reserved_bytes": ..., "peak_bytes": ...,
     "rss_bytes": ..., "measured_by": "cuda" | "storage-tracker"}
    {"event": "figures", "step": ..., "forward_seconds": ..., "communication_seconds": ..., ...}
                                                   now and then, where the config asks for `wall_clock_breakdown`
    {"event": "end", ...MeasuredRun of this rank alone}

Memory figures are null where a step did not measure them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Steps 0 and 1 pay for lazy states, bucket rebuilding, kernel selection and allocator growth.
WARM_UP_STEPS = 2
_TAIL = 0.05
"""Share of the steps on either side of the interval that holds nine of ten."""
STORAGE_TRACKER = "storage-tracker"
"""`measured_by` of a step whose memory was counted in Python, which slows the step down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """What the `ranks` of a run measured.

    `step_seconds` is the median of the first rank's steps after warm-up that no memory tracker slowed down, nine of ten
    of which lie between `step_seconds_low` and `step_seconds_high`;
    `peak_allocated_bytes` the largest over the ranks; `tokens_per_second` counts the tokens of all of them. None where
    the run gave no such figure.
    """

    steps: int
    ranks: int
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    step_seconds_low: float | None
    step_seconds_high: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None


def metrics_path(directory: Path, rank: int) -> Path:
    """Where a rank writes its metrics."""
    return directory / f"metrics-rank{rank}.jsonl"


def parse_row(line: str) -> dict[str, Any] | None:
    """A metrics line as a dictionary; None for a line cut short by the end of its process."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def read_metrics(directory: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """The complete rows of every rank, empty lists for ranks that wrote none."""
    rows: list[list[dict[str, Any]]] = []
    for rank in range(ranks):
        path = metrics_path(directory, rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        rows.append([row for line in lines if (row := parse_row(line)) is not None])
    return rows


def summarise(metrics: Sequence[Sequence[Mapping[str, Any]]]) -> MeasuredRun:
    """The figures of a run from the rows of every rank."""
    steps = [[row for row in rows if row.get("event") == "step"] for rows in metrics]
    first = steps[0] if steps else []
    settled = sorted(row["seconds"] for row in first[WARM_UP_STEPS:] if row.get("measured_by") != STORAGE_TRACKER)
    seconds = statistics.median(settled) if settled else None
    tail = round(len(settled) * _TAIL)
    settled_ranks = [rows[WARM_UP_STEPS:] for rows in steps]
    losses = [row["loss"] for row in first if row.get("loss") is not None]
    return MeasuredRun(
        steps=len(first),
        ranks=len(metrics),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        step_seconds=seconds,
        step_seconds_low=settled[tail] if settled else None,
        step_seconds_high=settled[-1 - tail] if settled else None,
        tokens_per_second=_rate(settled_ranks, "tokens", seconds),
        samples_per_second=_rate(settled_ranks, "samples", seconds),
        peak_allocated_bytes=_largest(steps, "peak_bytes"),
        peak_reserved_bytes=_largest(steps, "reserved_bytes"),
        peak_rss_bytes=_largest(steps, "rss_bytes"),
    )


def _rate(ranks: Sequence[Sequence[Mapping[str, Any]]], key: str, seconds: float | None) -> float | None:
    """Units of `key` per second: the mean of each rank's steps, summed over ranks, over the step time."""
    if not seconds:
        return None
    per_step = sum(statistics.fmean(row.get(key) or 0 for row in rows) for rows in ranks if rows)
    return per_step / seconds if per_step else None


def _largest(steps: Sequence[Sequence[Mapping[str, Any]]], key: str) -> int | None:
    values = [row[key] for rows in steps for row in rows if row.get(key)]
    return max(values) if values else None
