"""A benchmark while it goes, and what it found, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from dsplan.diagnostics.bench import session
from dsplan.diagnostics.bench.session import Work
from dsplan.render.show import Block, Text, can_redraw, terminal
from dsplan.render.table_columns import Table, columns
from hardware_db.measurement import Measurement, RateMeasurement
from hardware_db.microbench.grid import Point
from hardware_db.notices import printable
from hardware_db.store.transfer import to_document
from hardware_db.units import GB, format_bytes, format_count, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress

    from dsplan.diagnostics.bench.benchmark import BenchReport


class BenchView:
    """Draws the events of a benchmark on `out`; without `lines`, a pipe gets nothing. Use as a context manager."""

    def __init__(self, *, out: TextIO, lines: bool) -> None:
        self._out = out
        self._lines = lines
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> BenchView:
        if can_redraw(self._out):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column as RichColumn

            console = terminal(self._out)
            bar = BarColumn(bar_width=console.width // 5)
            words = TextColumn("{task.description}", markup=False, table_column=RichColumn(overflow="fold"))
            columns = (bar, MofNCompleteColumn(), TimeElapsedColumn(), words)
            self._progress = Progress(*columns, console=console, transient=True)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, event: session.Event) -> None:
        """Draw one event."""
        if self._progress is not None:
            self._draw(self._progress, event)
        elif self._lines and (text := _progress_line(event)):
            print(printable(text), file=self._out, flush=True)

    def _draw(self, progress: Progress, event: session.Event) -> None:
        if isinstance(event, session.Begun):
            self._task = progress.add_task("starting ranks", total=event.total, completed=event.stored)
        elif isinstance(event, session.Started):
            progress.update(self._task, description=work_words(event.work))
        elif isinstance(event, session.Waiting):
            progress.update(self._task, description="waiting for another dsplan bench")
        elif isinstance(event, session.TimeIsUp):
            progress.update(self._task, description="time is up")
        else:
            progress.advance(self._task)
            if isinstance(event, session.Refused):
                progress.console.print(_progress_line(event))


def _progress_line(event: session.Event) -> str:
    if isinstance(event, session.Begun):
        return f"{event.total} to measure, {event.stored} of them stored already"
    if isinstance(event, session.Measured):
        return f"{work_words(event.work)}: {result_words(event.record)}"
    if isinstance(event, session.Refused):
        return f"{work_words(event.work)}: not measured ({event.reason})"
    if isinstance(event, session.Waiting):
        return "waiting for another dsplan bench"
    return ""


SCHEMA_VERSION = 1


def report_to_dict(report: BenchReport) -> dict[str, object]:
    """Every new record, and how much of the plan is done."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": report.plan.device,
        "fingerprint": report.fingerprint,
        "database": str(report.database),
        "wanted": len(report.plan.points) + len(report.plan.training),
        "stored_before": report.stored,
        "measured_by_others": report.found,
        "measured": [to_document(event.record) for event in report.measured],
        "refused": [{"work": work_words(event.work), "reason": event.reason} for event in report.refused],
        "left": report.left,
        "learnt": report.learnt,
        "seconds": report.seconds,
    }


def report_blocks(report: BenchReport) -> list[Block]:
    """Return the new rates by operation, the new runs beside their predictions, and what is still to be done."""
    records = [event.record for event in report.measured]
    rates = [record for record in records if isinstance(record, RateMeasurement)]
    runs = [record for record in records if isinstance(record, Measurement)]
    blocks: list[Block] = []
    if rates:
        blocks.append(_rate_table(rates))
    if runs:
        blocks.append(_run_table(runs))
    blocks += [
        Text(text=f"not measured: {work_words(event.work)}: {event.reason}", style="warning")
        for event in report.refused
    ]
    blocks.append(Text(text=_summary(report)))
    if report.learnt:
        blocks.append(Text(text=report.learnt))
    if report.left:
        blocks.append(
            Text(text=f"time is up: {report.left} are left; the next `dsplan bench` continues", style="warning")
        )
    return blocks


def _rate_table(rates: Iterable[RateMeasurement]) -> Table:
    """Lowest and highest of each operation over its sizes, and how much its samples usually differ."""
    groups: dict[tuple[str, str, int], list[RateMeasurement]] = defaultdict(list)
    for rate in rates:
        groups[rate.operation.replace("_", " "), rate.dtype, rate.ranks].append(rate)
    rows = []
    for (operation, dtype, ranks), group in groups.items():
        low, high = min(group, key=lambda rate: rate.value), max(group, key=lambda rate: rate.value)
        spread = statistics.median(rate.spread or 0.0 for rate in group)
        lowest, highest = (rate_words(rate.value, rate.unit) for rate in (low, high))
        rows.append([operation, dtype or "-", str(ranks), str(len(group)), lowest, highest, f"{spread:.0%}"])
    headings = columns("operation", "dtype", "?>ranks", "??>points", ">lowest", ">highest", "??>spread")
    return Table(columns=headings, rows=rows, title="rates")


def _run_table(runs: Iterable[Measurement]) -> Table:
    headings = columns("model", "strategy", "??>ranks", ">step", "?>predicted", "?>ratio")
    return Table(columns=headings, rows=[_run_row(run) for run in runs], title="training")


def _run_row(run: Measurement) -> list[str]:
    measured, predicted = run.measured.step_seconds, run.predicted.step_seconds
    cluster = run.plan["cluster"]
    ranks = str(cluster["gpus"]) if isinstance(cluster, dict) else "-"
    if measured is None or run.outcome != "completed":
        return [run.model, run.strategy, ranks, run.outcome.replace("_", " "), "-", "-"]
    beside = ["-", "-"] if not predicted else [format_seconds(predicted), format_ratio(measured / predicted)]
    return [run.model, run.strategy, ranks, format_seconds(measured), *beside]


def _summary(report: BenchReport) -> str:
    parts = [f"{len(report.measured)} measured in {format_seconds(report.seconds)}"]
    if report.stored:
        parts.append(f"{report.stored} were stored before (--again measures them anew)")
    if report.found:
        parts.append(f"{report.found} were measured by another dsplan bench meanwhile")
    if report.refused:
        parts.append(f"{len(report.refused)} could not be measured")
    return f"{'; '.join(parts)}; database {report.database}"


# Pieces of a benchmark and their results, in a few words each.


def work_words(work: Work) -> str:
    """`matmul fp32 512x512x512, 2 ranks` or a training run in one line."""
    if not isinstance(work, Point):
        return str(work)
    parts = [work.operation.replace("_", " "), work.dtype, "x".join(str(extent) for extent in work.shape)]
    parts.append(format_bytes(work.size) if work.size else "")
    return f"{' '.join(part for part in parts if part)}, {work.ranks} {'rank' if work.ranks == 1 else 'ranks'}"


def result_words(record: RateMeasurement | Measurement) -> str:
    """Return what came of it, with the spread of its repeats."""
    if isinstance(record, RateMeasurement):
        return f"{rate_words(record.value, record.unit)}{_spread(record.spread)}"
    if record.outcome != "completed" or record.measured.step_seconds is None:
        return record.outcome.replace("_", " ")
    promised = record.predicted.step_seconds
    beside = "" if promised is None else f", predicted {format_seconds(promised)}"
    return f"{format_seconds(record.measured.step_seconds)} per step{beside}"


def rate_words(value: float, unit: str) -> str:
    """Return a rate with a unit that keeps three digits: `76.6 GFLOP/s`, `1.4 GB/s`, `170 us`."""
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes/s":
        return f"{value / GB:.3g} GB/s"
    if unit == "FLOP/s":
        return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
    return f"{format_count(value)} {unit}"


def _spread(spread: float | None) -> str:
    return "" if spread is None else f" (samples differ by {spread:.0%})"
