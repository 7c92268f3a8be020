"""A benchmark while it goes: a progress bar on a terminal, a line per result in a pipe."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from dsplan.render.bench_report import result_words, work_words
from strategies.bench import session

if TYPE_CHECKING:
    from rich.progress import Progress


class BenchView:
    """Draws the events of a benchmark on `out`; without `lines`, a pipe gets nothing. Use as a context manager."""

    def __init__(self, *, out: TextIO, lines: bool) -> None:
        self._out = out
        self._lines = lines
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> BenchView:
        if self._out.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            console = Console(file=self._out, highlight=False, markup=False, emoji=False)
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
        elif self._lines and (text := _line(event)):
            print(text, file=self._out, flush=True)

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
                progress.console.print(_line(event))


def _line(event: session.Event) -> str:
    if isinstance(event, session.Begun):
        return f"{event.total} to measure, {event.stored} of them stored already"
    if isinstance(event, session.Measured):
        return f"{work_words(event.work)}: {result_words(event.record)}"
    if isinstance(event, session.Refused):
        return f"{work_words(event.work)}: not measured ({event.reason})"
    if isinstance(event, session.Waiting):
        return "waiting for another dsplan bench"
    return ""
