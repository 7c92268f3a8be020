"""TraceCache: earlier traces in the database; where that cannot be used, every answer is found anew and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hardware_db.store import Store, open_store
from hardware_db.trace_record import TraceRecord
from planner.errors import BrokenFile

Found = TypeVar("Found")


class TraceCache:
    """Opens the user's database for each question and lets go of it at once: a trace takes seconds, and others wait.

    `problem` is the one line that says why answers are not kept; empty where they are.
    """

    def __init__(self, opened: Callable[[], Store] = open_store) -> None:
        self._opened = opened
        self.problem = ""

    def find(self, key: str) -> TraceRecord | None:
        return self._asked(lambda store: store.trace(key), None)

    def series(self, series: str) -> tuple[TraceRecord, ...]:
        return self._asked(lambda store: store.traces(series), ())

    def keep(self, record: TraceRecord) -> None:
        self._asked(lambda store: store.add_trace(record), False)

    def _asked(self, question: Callable[[Store], Found], without: Found) -> Found:
        if self.problem:
            return without
        try:
            with self._opened() as store:
                return question(store)
        except BrokenFile as problem:
            self.problem = str(problem)
            return without
