"""From the rows that the ranks wrote to the figures of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first steps pay for allocator growth, lazy optimizer states and kernel selection.
_WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """What a run measured.

    `step_seconds` is the median of rank 0's steps after warm-up that no memory tracker slowed down;
    `peak_allocated_bytes` the largest over all ranks; `tokens_per_second` counts the tokens of all ranks. None where
    the run gave no such figure.
    """

    steps: int
    ranks: int
    first_loss: float | None
    last_loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None


def parse_row(line: str) -> dict[str, Any] | None:
    """A metrics line as a dictionary; None for a line cut short by the end of its process."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def read_metrics(directory: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """The rows of `metrics-rank{N}.jsonl` of every rank, empty lists for ranks that wrote none."""
    rows: list[list[dict[str, Any]]] = []
    for rank in range(ranks):
        path = directory / f"metrics-rank{rank}.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        rows.append([row for line in lines if (row := parse_row(line)) is not None])
    return rows


def summarise(metrics: Sequence[Sequence[Mapping[str, Any]]]) -> MeasuredRun:
    """The figures of a run from the rows of every rank."""
    steps = [[row for row in rows if row.get("event") == "step"] for rows in metrics]
    first = steps[0] if steps else []
    settled = [row for row in first[_WARM_UP_STEPS:] if row.get("measured_by") != "storage-tracker"]
    seconds = statistics.median(row["seconds"] for row in settled) if settled else None
    settled_ranks = [rows[_WARM_UP_STEPS:] for rows in steps]
    losses = [row["loss"] for row in first if row.get("loss") is not None]
    return MeasuredRun(
        steps=len(first),
        ranks=len(metrics),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        step_seconds=seconds,
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
