"""TraceCache: earlier traces in the database; where that cannot be used, every answer is found anew and says why."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from hardware_db.measurement import TraceRecord
from hardware_db.store import Store, open_store
from planner.errors import BrokenFile, DsplanError
from planner.vocabulary import POST_TRAINING, Task

# Versions of what a trace runs, from the packages' metadata: asking the packages themselves would import them.


_TRACER = (
    "strategies/tracing/step/*.py",
    "strategies/tracing/cuda/*.py",
    "strategies/tracing/storage_tracker.py",
    "strategies/tracing/to_hf/*.py",
    "strategies/tracing/to_hf/*.yaml",
)
"""The files that decide what a trace counts."""


def trace_versions(task: Task | None = None) -> dict[str, str]:
    """Return the versions of torch and transformers, "" where it is missing, and of the tracer: the hash of its code.

    Beside them stands that of TRL where its trainers run the task. So no answer of another tracer is taken for its own.

    Raises:
        DsplanError: torch is not installed.
    """
    torch = _version("torch")
    if not torch:
        raise DsplanError("--exact traces the model with torch, which is not installed; pip install 'dsplan[train]'")
    versions = {"torch": torch, "transformers": _version("transformers"), "tracer": tracer_version()}
    return {**versions, "trl": _version("trl")} if task in POST_TRAINING else versions


@functools.lru_cache(maxsize=1)
def tracer_version() -> str:
    """Return the hash of the tracer's files."""
    root = Path(__file__).parents[2]
    files = sorted(path for pattern in _TRACER for path in root.glob(pattern))
    code = hashlib.sha256()
    for path in files:
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


Row = TypeVar("Row")


class TraceCache:
    """Opens the user's database for each question and closes it at once: a trace takes seconds, and others wait.

    `problem` is the one line that says why answers are not kept; empty where they are.
    """

    def __init__(self, opened: Callable[[], Store] = open_store) -> None:
        self._opened = opened
        self.problem = ""

    def find(self, key: str) -> TraceRecord | None:
        """Return the record of a question, if it was answered."""
        return self._ask(lambda store: store.trace(key), None)

    def series(self, series: str) -> tuple[TraceRecord, ...]:
        """Return all records of a series."""
        return self._ask(lambda store: store.traces(series), ())

    def keep(self, record: TraceRecord) -> None:
        """Keep a record in place of an older one."""
        self._ask(lambda store: store.add_trace(record), False)

    def _ask(self, question: Callable[[Store], Row], without: Row) -> Row:
        if self.problem:
            return without
        try:
            with self._opened() as store:
                return question(store)
        except BrokenFile as problem:
            self.problem = str(problem)
            return without
