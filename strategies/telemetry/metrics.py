"""The metrics of a run: the file each rank writes, its reader, and the figures that follow. No torch.

`metrics-rank{N}.jsonl` in the run directory holds one JSON object per line. Every attempt of the run appends to it, in
this order,

    {"event": "attempt", "attempt": k}             under `dsplan run`, where an attempt of the rank begins
    {"event": "plan", ...}                         rank 0 only, when the engine made the plan itself
    {"event": "step", "step": i, "global_step": n, "loss": mean over this rank's micro-batches,
     "seconds": since the last step ended, "load_seconds": of them before the first forward pass,
     "ready_seconds": of them before the first loss was there, "samples": ..., "tokens": ... of this rank,
     "allocated_bytes": ..., "reserved_bytes": ..., "peak_bytes": ..., "rss_bytes": ..., "private_bytes": ...,
     "measured_by": "cuda" | "storage-tracker", "profiled": true where `--profile` watched the step}
    {"event": "figures", "step": ..., "forward_seconds": ..., "communication_seconds": ..., ...}
                                                   now and then, where the config asks for `wall_clock_breakdown`
    {"event": "machine", "time": ..., "cpu_percent": ..., "gpu_utilization_percent": ..., ...}
                                                   every few seconds; `strategies/telemetry/machine.py` has the names
    {"event": "alert", ...Alert}                   where one begins
    {"event": "end", ...MeasuredRun of this rank in this attempt alone}

`step` counts from 0 in the process that wrote it, `global_step` from 1 over all attempts: an attempt that resumes from
an earlier step writes the steps after it again, and those before it took their place are no part of the run's
lineage. Memory figures are null where a step did not measure them.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from hardware_db.notices import notice
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import metrics_path

if TYPE_CHECKING:
    from hardware_db.measurement import Measured

Row = Mapping[str, Any]

# Steps 0 and 1 pay for lazy states, bucket rebuilding, kernel selection and allocator growth.
WARM_UP_STEPS = 2
_TAIL = 0.05
"""Share of the steps on either side of the interval that holds nine of ten."""
RECENT_STEPS = 20
"""Last steps whose median is the step time of a run that goes on; a choice."""
STORAGE_TRACKER = "storage-tracker"
"""`measured_by` of a step whose memory was counted in Python, which slows the step down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Measurements of the `ranks` of a run; None if the run gave no such figure.

    `steps` and losses are those of the final lineage, each step once, however often it was run; a loss is the mean over
    the ranks. The other figures are those of the last attempt that has steps after warm-up, because attempts may follow
    different plans: `step_seconds` is the median of the first rank's steps after warm-up that no memory tracker slowed
    down, nine of ten of which lie between `step_seconds_low` and `step_seconds_high`; `peak_allocated_bytes` the
    largest over the ranks; `tokens_per_second` counts the tokens of all of them.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The seconds of a step and what they make of its units; None where that was not measured."""

    step_seconds: float | None = None
    """The median of steps."""
    tokens_per_second: float | None = None
    """Of all ranks: the mean of a step over the median of its seconds."""
    samples_per_second: float | None = None
    """The same of samples."""


def recent_pace(metrics: Sequence[Sequence[Row]]) -> Pace:
    """Return the pace of the last steps of the last attempt, those that measuring slowed down left out where it can."""
    ranks = [
        [row for row in rows if row.get("event") == "step"][-RECENT_STEPS:]
        for rows in of_attempt(metrics, last_attempt(metrics))
    ]
    return pace_of(ranks)


def pace_of(ranks: Sequence[Sequence[Row]]) -> Pace:
    """Return the pace of steps, the first rank's with what the others did meanwhile."""
    first = next((rows for rows in ranks if rows), ())
    seconds = [row["seconds"] for row in first if not is_slowed(row)] or [row["seconds"] for row in first]
    median = statistics.median(seconds) if seconds else None
    return Pace(
        step_seconds=median,
        tokens_per_second=_rate(ranks, "tokens", median),
        samples_per_second=_rate(ranks, "samples", median),
    )


_GROUPS = {"seconds": "seconds", "bytes": "memory"}


def group(name: str) -> str:
    """Return a figure's name below the heading that trackers draw it under: `train/loss`, `seconds/load_seconds`."""
    return f"{_GROUPS.get(name.rpartition('_')[2], 'train')}/{name}"


def parse_row(line: str) -> dict[str, Any] | None:
    """Read a metrics line; None for one cut short by the end of its process."""
    import msgspec

    try:
        row = msgspec.json.decode(line)  # a quarter of the time of json, which takes NaN and Infinity too
    except msgspec.DecodeError:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            return None
    return row if isinstance(row, dict) else None


def read_metrics(directory: Path, ranks: int) -> list[list[dict[str, Any]]]:
    """Return the complete rows of every rank, empty lists for ranks that wrote none."""
    paths = [metrics_path(directory, rank) for rank in range(ranks)]
    lines = [path.read_text(errors="replace").splitlines() if path.exists() else [] for path in paths]
    return [[row for line in rank_lines if (row := parse_row(line)) is not None] for rank_lines in lines]


def of_attempt(metrics: Sequence[Sequence[Row]], attempt: int) -> list[list[Row]]:
    """Return the rows of one attempt, of the ranks that took part in it."""
    ranks = [[row for index, row in with_attempts(rows) if index == attempt] for rows in metrics]
    return [rows for rows in ranks if rows]


def last_attempt(metrics: Sequence[Sequence[Row]]) -> int:
    """Return the last attempt that wrote anything; 0 where none did."""
    return max((index for rows in metrics for index, _ in with_attempts(rows)), default=0)


def lineage(rows: Sequence[Row]) -> list[Row]:
    """Return a rank's step rows in the order of training, each step as it was run last.

    A row whose `global_step` was reached before begins a new course from there: what came after that step has no part
    in the weights at the end.
    """
    course: list[Row] = []
    for row in rows:
        if row.get("event") != "step":
            continue
        while course and step_number(course[-1]) >= step_number(row):
            course.pop()
        course.append(row)
    return course


def summarise(metrics: Sequence[Sequence[Row]]) -> MeasuredRun:
    """Return the figures of a run from the rows of every rank."""
    course = lineage(next((rows for rows in metrics if rows), ()))
    steps = _last_settled(metrics)
    first = next((rows for rows in steps if rows), [])
    settled = sorted(row["seconds"] for row in _after_warm_up(first) if not is_slowed(row))
    seconds = statistics.median(settled) if settled else None
    tail = round(len(settled) * _TAIL)
    settled_ranks = [_after_warm_up(rows) for rows in steps]
    losses = _mean_losses(metrics, course)
    return MeasuredRun(
        steps=len(course),
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


def _mean_losses(metrics: Sequence[Sequence[Row]], course: Sequence[Row]) -> list[float]:
    """Return the losses of a course's steps: means over the ranks that have one, in a pipeline those of its end."""
    by_step: dict[int, list[tuple[float, float]]] = {step_number(row): [] for row in course}
    for rows in metrics:
        for row in lineage(rows):
            if row.get("loss") is not None and step_number(row) in by_step:
                by_step[step_number(row)].append((row["loss"], row.get("samples") or 1))
    return [statistics.fmean(*zip(*losses, strict=True)) for losses in by_step.values() if losses]


_ALIKE = 0.05
"""Ranks that are within this of the fastest count as fast: steps of one rank differ as much."""


def relative_rates(metrics: Sequence[Sequence[Row]]) -> str | None:
    """Return how fast each rank's forward passes are beside the fastest's, as `planner.types.shares` reads it.

    They are samples over the seconds from the first forward pass of a step to its loss, medians of the last attempt's
    steps after warm-up, two digits; None where fewer than two ranks have such steps, or some have none.
    """
    rates = []
    for rows in _last_settled(metrics):
        each = list(filter(None, map(_forward_rate, _after_warm_up(rows))))
        if not each:
            return None
        rates.append(statistics.median(each))
    if len(rates) < 2:
        return None
    fastest = max(rates)
    shares = [1.0 if rate > (1 - _ALIKE) * fastest else max(round(rate / fastest, 2), 0.01) for rate in rates]
    return ",".join(f"{len(list(ranks))}x{rate:g}" for rate, ranks in groupby(shares))


def _forward_rate(row: Row) -> float | None:
    ready, load = row.get("ready_seconds"), row.get("load_seconds") or 0.0
    return row["samples"] / (ready - load) if row.get("samples") and ready is not None and ready > load else None


def with_attempts(rows: Sequence[Row]) -> Iterator[tuple[int, Row]]:
    """Yield every row with the attempt that wrote it."""
    attempt = 0
    for row in rows:
        if row.get("event") == "attempt":
            attempt = int(row["attempt"])
        yield attempt, row


def step_number(row: Row) -> int:
    """Return a step's place in the lineage; a row without `global_step` counts in its own process alone."""
    return int(row["global_step"]) if "global_step" in row else int(row["step"]) + 1


def is_slowed(row: Row) -> bool:
    """Return whether measuring slowed a step down, so that its seconds say nothing of others."""
    return row.get("measured_by") == STORAGE_TRACKER or bool(row.get("profiled"))


def _after_warm_up(steps: Sequence[Row]) -> list[Row]:
    return [row for row in steps if row["step"] >= WARM_UP_STEPS]


def _last_settled(metrics: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Return every rank's step rows of the last attempt with steps after warm-up; else of the last with steps."""
    attempts: dict[int, list[list[Row]]] = {}
    for rows in metrics:
        by_attempt: dict[int, list[Row]] = {}
        for attempt, row in with_attempts(rows):
            if row.get("event") == "step":
                by_attempt.setdefault(attempt, []).append(row)
        for attempt, steps in by_attempt.items():
            attempts.setdefault(attempt, []).append(steps)
    settled = [attempt for attempt, ranks in attempts.items() if any(map(_after_warm_up, ranks))]
    return attempts[max(settled or attempts)] if attempts else []


def _rate(ranks: Sequence[Sequence[Row]], key: str, seconds: float | None) -> float | None:
    """Return units of `key` per second: the mean of each rank's steps, summed over ranks, over the step time."""
    if not seconds:
        return None
    per_step = sum(statistics.fmean(row.get(key) or 0 for row in rows) for rows in ranks if rows)
    return per_step / seconds if per_step else None


def _largest(steps: Sequence[Sequence[Row]], key: str) -> int | None:
    values = [row[key] for rows in steps for row in rows if row.get(key)]
    return max(values) if values else None


def measured_of(run: MeasuredRun) -> Measured:
    """Return the figures of a run as the database keeps them."""
    from hardware_db.measurement import Measured

    alike = {field.name: getattr(run, field.name) for field in fields(Measured) if hasattr(run, field.name)}
    return Measured(host_bytes=None if run.peak_rss_bytes is None else run.peak_rss_bytes * run.ranks, **alike)


class MetricsFile:
    """Appends one rank's rows from any thread: behind those of earlier attempts under `dsplan run`, to a new file else.

    A file that takes no more is reported once, on stderr, and ends no training.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        options = AttemptOptions.load(directory)
        self.path = metrics_path(directory, rank)
        self.attempt = 0 if options is None else options.attempt
        self._lock = Lock()
        self._is_reported = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if options is None else 0)
        self._file: int | None = os.open(self.path, flags, 0o644)
        self._is_cut = _is_cut(self.path)
        self._began = self.path.stat().st_size
        if options is not None:
            self.write({"event": "attempt", "attempt": options.attempt})

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._file is not None

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: one write, so that nobody reads half of it and no other writer comes between."""
        line = json.dumps(row).encode() + b"\n"
        with self._lock:
            if self._file is None:
                return
            # What a killed attempt or a full disk left of a line gets an end.
            whole = b"\n" + line if self._is_cut else line
            try:
                self._is_cut = os.write(self._file, whole) < len(whole)
            except OSError as problem:
                self._report(problem)

    def own_rows(self) -> list[dict[str, Any]]:
        """Read back what this attempt wrote: a long run keeps no rows in memory."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._began)
                return [row for line in file if (row := parse_row(line.decode(errors="replace"))) is not None]
        except OSError as problem:
            notice(f"{self.path} cannot be read ({problem.strerror}); the run has no summary")
            return []

    def close(self) -> None:
        """Close the file; later rows are dropped."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _report(self, problem: OSError) -> None:
        if not self._is_reported:
            self._is_reported = True
            notice(f"{self.path} takes no more rows ({problem.strerror})")


def _is_cut(path: Path) -> bool:
    """Return whether a file ends in the middle of a line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
