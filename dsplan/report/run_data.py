"""Content of a run directory for pictures: steps, checkpoints, restarts and alerts on one axis of time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.errors import BrokenFile
from hardware_db.files import runs_dir
from hardware_db.records import dataclass
from planner.types.plan import Plan
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.report import (
    COMPLETED,
    INTERRUPTED,
    AttemptReport,
    Outcome,
    RunReport,
    earlier_attempts,
    measured_run,
    metrics_of,
    outcome_of,
)
from strategies.launch.run_lock import is_held
from strategies.run_directory.files import JOURNAL_FILE, SPEC_FILE, metrics_files
from strategies.run_directory.journal import read_journal
from strategies.run_directory.spec import LaunchSpec
from strategies.telemetry.metrics import MeasuredRun, Row, is_slowed, with_attempts

MOST_POINTS = 1000
"""Of one run; more of them are drawn on top of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A step as it was run, or several steps in a row; bytes are of the rank that has most of them."""

    at: float
    """Seconds since the run began, when the step was over."""
    step: int
    """Over all attempts, from 1; the last of several."""
    loss: float | None
    """Mean over ranks and steps; None where it is no finite number."""
    seconds: float
    """Of one step; the median of several."""
    units_per_second: float | None
    """Tokens of all ranks, or samples where the run counts these."""
    peak_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int | None
    """Host memory of the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt on the axis of time."""

    report: AttemptReport
    began: float
    """Seconds since the run began; so is `ended`."""
    ended: float
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """Something that was noticed, saved, or went wrong."""

    at: float
    """Seconds since the run began."""
    kind: str
    """`checkpoint`, `ending`, or a kind of alert."""
    is_alert: bool = False
    step: int | None
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """A run for its pictures."""

    name: str
    """Of its directory."""
    report: RunReport
    is_running: bool
    is_ended: bool
    """Whether anybody wrote how it ended, or it was seen to be cut off."""
    attempts: tuple[Attempt, ...]
    happenings: tuple[Happening, ...]

    @property
    def plan(self) -> Plan | None:
        """The last plan, None for a run without any."""
        return self.report.plan

    @property
    def measured(self) -> MeasuredRun:
        """Peaks and times of the run."""
        return self.report.measured

    @property
    def outcome(self) -> str:
        """Outcome in a word or two."""
        if self.is_running:
            return "running"
        return self.report.outcome.name.replace("_", " ") if self.is_ended else "end unknown"

    @property
    def counted(self) -> Literal["tokens", "samples"]:
        """Unit that throughput counts."""
        return self.report.counted

    @property
    def seconds(self) -> float:
        """Seconds that the run lasted so far."""
        return max((attempt.ended for attempt in self.attempts), default=0.0)

    @property
    def points(self) -> Iterator[Point]:
        """Of all attempts, by time."""
        for attempt in self.attempts:
            yield from attempt.points


def is_run_directory(path: Path) -> bool:
    """Return whether a directory is one of `dsplan run`, or holds metrics as its ranks write them."""
    return path.is_dir() and ((path / JOURNAL_FILE).is_file() or bool(metrics_files(path)))


def check_run_directory(directory: Path) -> None:
    """Read a run directory."""
    if not is_run_directory(directory):
        remedy = f"name a run directory of dsplan run; where no --run-dir is given they lie below {runs_dir()}"
        raise BrokenFile(directory, "is no run directory", remedy)


def read_run(directory: Path, metrics: Sequence[Sequence[Row]] | None = None) -> RunData:
    """Return a run, finished or not; of the rows of `metrics`, by rank, where somebody has read them.

    Raises:
        BrokenFile: the directory is not one of a run, or not as this version writes it.
    """
    check_run_directory(directory)
    try:
        return _read(directory, metrics_of(directory) if metrics is None else metrics)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        problem = f"holds rows that dsplan did not write ({type(error).__name__}: {error})"
        raise BrokenFile(directory, problem[:200], "name a run directory as dsplan run left it") from None


def _read(directory: Path, metrics: Sequence[Sequence[Row]]) -> RunData:
    journal = read_journal(directory)
    reports = earlier_attempts(directory, metrics) or (_read_unwatched(metrics),)
    running = is_held(directory)
    if running and not _is_closed(journal, reports[-1].attempt):
        reports = (*reports[:-1], replace(reports[-1], ending=None))
    began = reports[0].began
    path = directory / SPEC_FILE
    spec = LaunchSpec.load(path) if path.exists() else _spec(directory, reports[-1])
    # The directory may have been copied since.
    spec = replace(spec, run_directory=str(directory))
    plans = [report.plan for report in reports if report.plan is not None]
    whole = RunReport(
        spec=spec,
        outcome=_outcome(journal, reports[-1]),
        measured=measured_run(spec, metrics),
        plan=plans[-1] if plans else None,
        attempts=reports,
    )
    return RunData(
        name=directory.resolve().name,
        is_running=running,
        is_ended=reports[-1].ending is not None or _is_closed(journal, reports[-1].attempt),
        report=whole,
        attempts=tuple(_attempt(report, metrics, journal, began, whole.counted) for report in reports),
        happenings=tuple(sorted(_happenings(journal, metrics, reports), key=lambda happening: happening.at)),
    )


def _spec(directory: Path, report: AttemptReport) -> LaunchSpec:
    return LaunchSpec(script="", processes=report.ranks, run_directory=str(directory), supervision=DEFAULT_SUPERVISION)


def _read_unwatched(metrics: Sequence[Sequence[Row]]) -> AttemptReport:
    """Return what an engine wrote that no `dsplan run` watched. It began at 0 where no row has a time."""
    elapsed, began = 0.0, list[float]()
    for row in next((rows for rows in metrics if rows), ()):
        if _is_step(row):
            elapsed += float(row["seconds"])
        elif isinstance(row.get("time"), (int, float)):
            began.append(row["time"] - elapsed)
    ranks = sum(1 for rows in metrics if rows)
    return AttemptReport(attempt=0, began=min(began, default=0.0), seconds=elapsed, ranks=ranks)


def _is_closed(journal: Sequence[Mapping[str, Any]], attempt: int) -> bool:
    return any(row.get("attempt", 0) == attempt and row.get("event") in ("end", "ending") for row in journal)


def _outcome(journal: Sequence[Mapping[str, Any]], last: AttemptReport) -> Outcome:
    ended = [row for row in journal if row.get("event") == "end" and row.get("attempt", 0) == last.attempt]
    if last.ending is not None:
        return outcome_of(last.ending)
    return INTERRUPTED if ended and ended[-1].get("outcome") == "interrupted" else COMPLETED


# The steps of an attempt, on the axis of time.


def _attempt(
    report: AttemptReport,
    metrics: Sequence[Sequence[Row]],
    journal: Sequence[Mapping[str, Any]],
    origin: float,
    unit: Literal["tokens", "samples"],
) -> Attempt:
    ranks = [[row for number, row in with_attempts(rows) if number == report.attempt] for rows in metrics]
    rows = next((rows for rows in ranks if any(_is_step(row) for row in rows)), [])
    own = [row for row in journal if row.get("attempt", 0) == report.attempt]
    points = _together(_points(rows, ranks, _first_step_began(rows, own, report) - origin, unit))
    began = report.began - origin
    ended = max([began + report.seconds, *(point.at for point in points[-1:])])
    return Attempt(report=report, began=began, ended=ended, points=points)


def _first_step_began(rows: Sequence[Row], journal: Sequence[Mapping[str, Any]], report: AttemptReport) -> float:
    """Return when the first step of an attempt began, in seconds since 1970.

    Steps are written with how long they took, without the time of day. Whatever has that and comes after a step was
    written after it: the latest place that contradicts none of this is the true one but for the moment between.
    """
    elapsed, after, latest = 0.0, dict[int, float](), list[float]()
    for row in rows:
        if _is_step(row):
            elapsed += float(row["seconds"])
            after[_step(row)] = elapsed
        elif isinstance(row.get("time"), (int, float)) and elapsed:
            latest.append(row["time"] - elapsed)
    for row in journal:
        if row.get("event") in ("saved", "back") and row.get("step") in after:
            latest.append(row["time"] - after[row["step"]])
        elif row.get("event") in ("end", "ending"):
            latest.append(row["time"] - elapsed)
    starts = [row["time"] for row in journal if row.get("event") in ("attempt", "plan")]
    return max(report.began, min(latest)) if latest else max([report.began, *starts])


def _points(
    rows: Sequence[Row], ranks: Sequence[Sequence[Row]], start: float, unit: Literal["tokens", "samples"]
) -> Iterator[Point]:
    """Every step of the first rank, with what the others say of it."""
    others: dict[int, list[Row]] = {}
    for of_rank in ranks:
        for row in of_rank:
            if _is_step(row):
                others.setdefault(_step(row), []).append(row)
    at = start
    for row in rows:
        if not _is_step(row):
            continue
        seconds = float(row["seconds"])
        at += seconds
        same = others[_step(row)]
        units = sum(other.get(unit) or 0 for other in same)
        yield Point(
            at=at,
            step=_step(row),
            loss=_mean([other.get("loss") for other in same]),
            seconds=seconds,
            units_per_second=units / seconds if units and seconds > 0 and not is_slowed(row) else None,
            peak_bytes=_most(same, "peak_bytes"),
            reserved_bytes=_most(same, "reserved_bytes"),
            rss_bytes=_most(same, "rss_bytes"),
        )


def _together(points: Iterator[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS points, where there are more each of several steps."""
    every = list(points)
    size = math.ceil(len(every) / MOST_POINTS)
    if size <= 1:
        return tuple(every)
    return tuple(_merge(every[start : start + size]) for start in range(0, len(every), size))


def _merge(points: Sequence[Point]) -> Point:
    rates = [point.units_per_second for point in points if point.units_per_second is not None]
    return replace(
        points[-1],
        loss=_mean([point.loss for point in points]),
        seconds=statistics.median(point.seconds for point in points),
        units_per_second=statistics.median(rates) if rates else None,
        peak_bytes=max((point.peak_bytes for point in points if point.peak_bytes), default=None),
        reserved_bytes=max((point.reserved_bytes for point in points if point.reserved_bytes), default=None),
        rss_bytes=max((point.rss_bytes for point in points if point.rss_bytes), default=None),
    )


def _is_step(row: Row) -> bool:
    return row.get("event") == "step"


def _step(row: Row) -> int:
    return int(row["global_step"]) if "global_step" in row else int(row["step"]) + 1


def _mean(losses: Sequence[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None]
    mean = statistics.fmean(finite) if finite else math.nan
    return mean if math.isfinite(mean) else None


def _most(rows: Sequence[Row], key: str) -> int | None:
    return max((int(row[key]) for row in rows if row.get(key)), default=None)


# What happened.


def _happenings(
    journal: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Row]], reports: Sequence[AttemptReport]
) -> Iterator[Happening]:
    origin = reports[0].began
    for row in journal:
        if row.get("event") == "saved":
            step = int(row["step"])
            yield Happening(
                at=row["time"] - origin, kind="checkpoint", step=step, rank=None, text=f"checkpoint of step {step}"
            )
    for report in reports:
        if report.ending is not None:
            then = "" if report.decision is None else f"; {report.decision.why}"
            yield Happening(
                at=report.began + report.seconds - origin,
                kind="ending",
                step=report.ending.step,
                rank=report.ending.rank,
                text=f"{report.ending.kind.replace('_', ' ')}: {report.ending.reason}{then}",
            )
    noticed = [row for row in journal if row.get("event") == "alert"]
    # The journal has those of all nodes and those that the command noticed itself; without one there are the ranks'.
    for row in noticed or [row for rows in metrics for row in rows if row.get("event") == "alert"]:
        yield Happening(
            at=max(0.0, float(row["time"]) - origin),
            kind=str(row["kind"]),
            is_alert=True,
            step=row.get("step"),
            rank=row.get("rank"),
            text=str(row["message"]),
        )
