"""One frame of a run that goes on: what each rank does, loss and speed so far, and what happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsplan.render.charts import sparkline
from dsplan.render.plan_view import dims_text
from dsplan.render.recent_rows import RecentRows
from dsplan.render.run_report import profile_lines
from dsplan.render.show import Block, Style, Text
from dsplan.render.table_columns import Bar, Cell, Table, columns
from dsplan.report.run_data import Happening, RunData, check_run_directory, read_run
from hardware_db.records import dataclass
from hardware_db.units import format_bytes, format_count, format_seconds
from planner.types.plan import Plan
from strategies.launch.report import COMPLETED, metrics_of, rate_in
from strategies.launch.run_status import steps_to_reach
from strategies.run_directory.claim import saves_itself
from strategies.run_directory.files import heartbeat_path, profiles_in
from strategies.telemetry.metrics import MeasuredRun, Pace, Row, recent_pace

_ROOM_FOR_SPANS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNow:
    """A rank's last heartbeat; `heard_seconds` is its age, None where it has written nothing."""

    rank: int
    host: str = ""
    step: int | None = None
    step_seconds: float | None = None
    loss: float | None = None
    peak_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_bytes: int | None = None
    section: str = ""
    heard_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A run at one moment, `time` in seconds since 1970. `steps` is how many it shall have, None where nobody said.

    With `counts_anew` steps are counted from the begin of the last attempt, of several.
    """

    run: RunData
    ranks: tuple[RankNow, ...]
    steps: int | None
    time: float
    recent: Pace = Pace()
    """Of the last steps."""
    counts_anew: bool = False

    @property
    def seconds(self) -> float:
        """Seconds that the run lasts so far, also before anything was heard of it."""
        if not self.run.is_running:
            return self.run.seconds
        return max(self.run.seconds, self.time - self.run.report.attempts[0].began)

    @property
    def step(self) -> int:
        """The last that was done; a new attempt begins at its checkpoint."""
        return _last_step(self.run)

    @property
    def pace(self) -> MeasuredRun | Pace:
        """Step time and rates: of the last steps, and of a run that has ended those of its report."""
        measured = self.run.measured
        return self.recent if self.run.is_running or measured.step_seconds is None else measured

    @property
    def step_seconds(self) -> float | None:
        """The median of the steps that `pace` is of."""
        return self.pace.step_seconds

    @property
    def units_per_second(self) -> float | None:
        """The tokens or samples of all ranks in a step, over `step_seconds`."""
        return rate_in(self.run.counted, self.pace)

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the last ones; None where the number of steps is not known."""
        if self.steps is None or self.step_seconds is None or not self.run.is_running:
            return None
        return max(0, self.steps - self.step) * self.step_seconds


class RunWatch:
    """A run directory that is looked at again and again, whatever the length of its run.

    Raises:
        BrokenFile: it is no run directory.
    """

    def __init__(self, directory: Path, steps: int | None = None) -> None:
        check_run_directory(directory)
        self._directory = directory
        self._steps = steps
        self._metrics = RecentRows(directory)

    def look(self) -> Frame:
        """Return the run as it is now, with its last rows."""
        return _frame(self._directory, self._steps, self._metrics.read())


def frame_of(directory: Path, steps: int | None = None) -> Frame:
    """Return the run of a directory as it is now, with all that it measured.

    Raises:
        BrokenFile: it is no run directory.
    """
    check_run_directory(directory)
    return _frame(directory, steps, metrics_of(directory))


def _frame(directory: Path, steps: int | None, metrics: Sequence[Sequence[Row]]) -> Frame:
    run = read_run(directory, metrics)
    ranks = run.report.attempts[-1].ranks if run.report.attempts else 0
    now = time.time()
    return Frame(
        run=run,
        ranks=tuple(
            _rank_now(directory, rank, metrics[rank] if rank < len(metrics) else (), now) for rank in range(ranks)
        ),
        steps=steps
        or steps_to_reach(
            directory,
            run.report.spec.arguments,
            attempts=len(run.attempts),
            step=_last_step(run),
            is_completed=run.outcome == COMPLETED.name,
        ),
        time=now,
        recent=recent_pace(metrics),
        counts_anew=len(run.attempts) > 1 and saves_itself(directory),
    )


def _last_step(run: RunData) -> int:
    newest = 0
    for point in run.points:
        newest = point.step
    return newest


def _rank_now(directory: Path, rank: int, rows: Sequence[Row], now: float) -> RankNow:
    begins = [index for index, row in enumerate(rows) if row.get("event") == "attempt"]
    attempt = rows[begins[-1] :] if begins else rows
    last = {str(row.get("event")): row for row in rows}
    step, machine = last.get("step", {}), last.get("machine", {})
    beat = _heartbeat(heartbeat_path(directory, rank))
    heard = beat.get("time")
    return RankNow(
        rank=rank,
        host=str(beat.get("host", "")),
        step=int(step["global_step"]) if "global_step" in step else None,
        step_seconds=step.get("seconds"),
        loss=step.get("loss"),
        peak_bytes=max((int(row["peak_bytes"]) for row in attempt if row.get("peak_bytes")), default=None),
        gpu_percent=machine.get("gpu_utilization_percent"),
        gpu_bytes=machine.get("gpu_memory_used_bytes"),
        section="ended" if beat.get("has_ended") else str(beat.get("section", "")),
        heard_seconds=max(0.0, now - heard) if isinstance(heard, (int, float)) else None,
    )


def _heartbeat(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


# Frames as blocks and as JSON.


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """Amount of detail that a page shows of a run."""

    ranks: int | None = None
    """How many have a line of their own, those first with which something is wrong; None for all."""
    happenings: int = 5
    profiles: bool = True
    plan: bool = True
    curves: bool = True


_LOW = Detail(profiles=False, plan=False)
DETAILS = (
    Detail(),
    Detail(profiles=False),
    _LOW,
    replace(_LOW, happenings=3),
    replace(_LOW, happenings=2),
    replace(_LOW, happenings=2, curves=False),
    replace(_LOW, happenings=1, curves=False),
)
"""What a lower and lower terminal shows: the state of the run and its last alert stay to the end."""


def frame_blocks(frame: Frame, width: int, *, unicode: bool = True, detail: Detail = DETAILS[0]) -> list[Block]:
    """Return the frame for a terminal of so many characters."""
    run = frame.run
    style: Style = "good" if run.is_running or run.outcome == "completed" else "warning"
    blocks: list[Block] = [Text(text=f"{run.name}: {_state(frame)}", style=style)]
    if run.plan is not None and detail.plan:
        blocks.append(Text(text=_plan_text(run.plan), style="faint"))
    if detail.curves:
        blocks += _curves(frame, width, unicode=unicode)
    recent = _recent(run.happenings, detail.happenings)
    shown, others = _choose_ranks(frame, recent, detail.ranks)
    if shown:
        blocks.append(_ranks_table(frame, shown))
    if others:
        blocks.append(Text(text=_others_text(others, beside=bool(shown)), style="faint"))
    if recent:
        rows = [
            [format_seconds(event.at), "" if event.step is None else str(event.step), _happening_text(event)]
            for event in recent
        ]
        blocks.append(Table(title="what happened last", columns=columns("?>after", "??>step", "what"), rows=rows))
    if detail.profiles:
        blocks += [Text(text=line, style="faint") for line in profile_lines(run.report.spec.directory)]
    return blocks


def _recent(happenings: Sequence[Happening], most: int) -> list[Happening]:
    """Return the last of them; checkpoints, of which there is one after another, leave the others their place."""
    others = [event for event in happenings if event.kind != "checkpoint"][-most:]
    room = max(most - len(others), int(most > 1))
    saved = [event for event in happenings if event.kind == "checkpoint"]
    saved = saved[-room:] if room else []
    return sorted([*others[-(most - len(saved)) :], *saved], key=lambda event: event.at)


def _happening_text(event: Happening) -> str:
    if not event.is_alert:
        return event.text
    named = "" if event.rank is None or f"rank {event.rank} " in event.text else f"rank {event.rank}: "
    return f"alert: {named}{event.text}"


_LATE_STEPS = 2
_SILENT_SECONDS = 30.0


def _choose_ranks(
    frame: Frame, recent: Sequence[Happening], most: int | None
) -> tuple[Sequence[RankNow], Sequence[RankNow]]:
    """Return the ranks that get a line each (first those that lag, are silent, or raised an alert), and the others."""
    if most is None or len(frame.ranks) <= most:
        return frame.ranks, ()
    alerted = {event.rank for event in recent if event.kind != "checkpoint"}

    def is_well(rank: RankNow) -> bool:
        silent = rank.heard_seconds is None or rank.heard_seconds > _SILENT_SECONDS
        lags = rank.step is None or rank.step + _LATE_STEPS <= frame.step
        return not (lags or rank.rank in alerted or (silent and frame.run.is_running))

    first = sorted(frame.ranks, key=lambda rank: (is_well(rank), rank.rank))[:most]
    numbers = {rank.rank for rank in first}
    return (
        [rank for rank in frame.ranks if rank.rank in numbers],
        [rank for rank in frame.ranks if rank.rank not in numbers],
    )


def _others_text(ranks: Sequence[RankNow], *, beside: bool) -> str:
    """Ranks that have no line of their own, as ranges."""
    figures: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("step ", [rank.step for rank in ranks], lambda value: f"{value:.0f}"),
        ("", [rank.step_seconds for rank in ranks], format_seconds),
        ("", [rank.peak_bytes for rank in ranks], format_bytes),
        ("GPU ", [rank.gpu_percent for rank in ranks], lambda value: f"{value:.0f}%"),
    ]
    written = [f"{len(ranks)} {'more ' if beside else ''}{'rank' if len(ranks) == 1 else 'ranks'}"]
    for name, values, spell in figures:
        measured = [value for value in values if value is not None]
        if measured:
            ends = dict.fromkeys((spell(min(measured)), spell(max(measured))))
            written.append(name + " to ".join(ends))
    return ", ".join(written)


def _state(frame: Frame) -> str:
    run = frame.run
    of = f" of {frame.steps:,}" if frame.steps else ""
    steps = f"step {frame.step:,}" + (" from the attempt's begin" if frame.counts_anew and not of else of)
    parts = [
        run.outcome,
        steps,
        f"{format_seconds(frame.seconds)} so far" if run.is_running else format_seconds(frame.seconds),
    ]
    if frame.seconds_left is not None:
        parts.append(f"{format_seconds(frame.seconds_left)} left")
    if len(run.attempts) > 1:
        parts.append(f"attempt {len(run.attempts)}")
    return ", ".join(parts)


def _plan_text(plan: Plan) -> str:
    chosen = plan.configuration
    return (
        f"{plan.model['name']}: {chosen.strategy} ({chosen.backend}), {dims_text(chosen)}, micro-batch"
        f" {chosen.micro_batch_text} x {chosen.gradient_accumulation_steps}, {chosen.precision}"
    )


def _curves(frame: Frame, width: int, *, unicode: bool) -> list[Block]:
    points = list(frame.run.points)
    losses = [point.loss for point in points]
    series: dict[str, tuple[list[float | None], float | None, Callable[[float], str]]] = {
        "loss": (losses, _last(losses), lambda value: f"{value:.4f}"),
        f"{frame.run.counted}/s": ([point.units_per_second for point in points], frame.units_per_second, format_count),
        "step": ([point.seconds for point in points], frame.step_seconds, format_seconds),
    }
    lines: list[tuple[str, list[float | None], str]] = []
    for name, (values, figure, written) in series.items():
        measured = [value for value in values if value is not None]
        if measured and figure is not None:
            span = f" ({written(min(measured))} to {written(max(measured))})" if width >= _ROOM_FOR_SPANS else ""
            lines.append((name, values, written(figure) + span))
    room = width - 11 - max((len(figures) for *_, figures in lines), default=0)
    drawn = (
        (name, sparkline(values, max(1, min(60, room)), unicode=unicode), figures) for name, values, figures in lines
    )
    return [Text(text=f"{name:9} {curve} {figures}") for name, curve, figures in drawn]


def _last(losses: Sequence[float | None]) -> float | None:
    return next((loss for loss in reversed(losses) if loss is not None), None)


def _ranks_table(frame: Frame, ranks: Sequence[RankNow]) -> Table:
    plan, several = frame.run.plan, len({rank.host for rank in frame.ranks}) > 1
    predicted = plan.memory.peak_allocated_bytes if plan is not None else 0
    names = [
        ">rank", ">step", "???host", ">last step", "???>loss", ">memory", "??predicted", "?>GPU", "??doing", ">silent",
    ]  # fmt: skip
    kept = [name for name in names if (several or name != "???host") and (predicted or name != "??predicted")]
    if not any(rank.gpu_percent is not None for rank in frame.ranks):
        kept.remove("?>GPU")
    if not frame.run.is_running:
        kept = [name for name in kept if name not in ("??doing", ">silent")]
    rows = []
    for rank in ranks:
        share: Cell = Bar(share=rank.peak_bytes / predicted) if rank.peak_bytes and predicted else "-"
        cells: dict[str, Cell] = {
            ">rank": str(rank.rank),
            ">step": "-" if rank.step is None else str(rank.step),
            "???host": rank.host,
            ">last step": "-" if rank.step_seconds is None else format_seconds(rank.step_seconds),
            "???>loss": "-" if rank.loss is None else f"{rank.loss:.4f}",
            ">memory": format_bytes(rank.peak_bytes) if rank.peak_bytes else "-",
            "??predicted": share,
            "?>GPU": "-" if rank.gpu_percent is None else f"{rank.gpu_percent:.0f}%",
            "??doing": rank.section or "-",
            ">silent": "-" if rank.heard_seconds is None else format_seconds(rank.heard_seconds),
        }
        rows.append([cells[name] for name in kept])
    return Table(columns=columns(*kept), rows=rows)


def frame_to_dict(frame: Frame) -> dict[str, Any]:
    """Return what `watch --json` prints."""
    run = frame.run
    return {
        "schema_version": 1,
        "run": run.name,
        "outcome": run.outcome,
        "is_running": run.is_running,
        "attempts": len(run.attempts),
        "seconds": frame.seconds,
        "step": frame.step,
        "steps": frame.steps,
        "step_seconds": frame.step_seconds,
        "tokens_per_second": frame.pace.tokens_per_second,
        "samples_per_second": frame.pace.samples_per_second,
        "seconds_left": frame.seconds_left,
        "loss": _last([point.loss for point in run.points]),
        "ranks": [
            {
                "rank": rank.rank,
                "host": rank.host,
                "step": rank.step,
                "step_seconds": rank.step_seconds,
                "loss": rank.loss,
                "peak_bytes": rank.peak_bytes,
                "gpu_utilization_percent": rank.gpu_percent,
                "gpu_memory_used_bytes": rank.gpu_bytes,
                "section": rank.section,
                "heard_seconds": rank.heard_seconds,
            }
            for rank in frame.ranks
        ],
        "profiles": [path.name for paths in profiles_in(run.report.spec.directory).values() for path in paths],
        "happenings": [
            {"seconds": event.at, "kind": event.kind, "step": event.step, "rank": event.rank, "text": event.text}
            for event in run.happenings
        ],
    }
