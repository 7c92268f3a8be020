"""TraceCache: earlier traces in the database; where that cannot be used, every answer is found anew and says why."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hardware_db.measurement import TraceRecord
from hardware_db.store import Store, open_store
from planner.errors import BrokenFile, DsplanError

# Values from their JSON: dataclasses, tuples and mappings as the annotations of their fields say.


Value = TypeVar("Value")


def rebuild(kind: type[Value], document: Mapping[str, Any]) -> Value:
    """The value whose `asdict` was written as JSON, tuples having become lists on the way.

    Raises:
        KeyError, TypeError, ValueError: the document is not that of such a value.
    """
    hints = get_type_hints(kind)
    known = {item.name for item in fields(cast("Any", kind))}
    if unknown := document.keys() - known:
        raise KeyError(f"{kind.__name__} has no fields {', '.join(sorted(unknown))}")
    return kind(**{name: _value(hints[name], value) for name, value in document.items()})


def _value(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin in (Union, UnionType):
        options = [option for option in inner if option is not NoneType]
        return _value(options[0], value) if len(options) == 1 else value
    if is_dataclass(hint):
        return rebuild(cast("type[Any]", hint), value)
    if origin is tuple:
        kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_value(kind, item) for kind, item in zip(kinds, value, strict=True))
    if origin is Mapping:
        return {name: _value(inner[1], item) for name, item in value.items()}
    return value


# Versions of what a trace runs, from the packages' metadata: asking the packages themselves would import them.


_TRACER = (
    "strategies/tracing/step/*.py",
    "strategies/tracing/cuda/*.py",
    "strategies/tracing/storage_tracker.py",
    "strategies/tracing/to_hf/*.py",
)
"""The files that decide what a trace counts."""


def trace_versions() -> dict[str, str]:
    """torch and transformers as installed, transformers empty where it is missing, and the tracer's own version: the
    hash of its code, so that no answer of another tracer is taken for its own.

    Raises:
        DsplanError: torch is not installed.
    """
    torch = _version("torch")
    if not torch:
        raise DsplanError("--exact traces the model with torch, which is not installed; pip install 'dsplan[train]'")
    return {"torch": torch, "transformers": _version("transformers"), "tracer": tracer_version()}


@functools.lru_cache(maxsize=1)
def tracer_version() -> str:
    """The hash of the tracer's files."""
    root = Path(__file__).parents[3]
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


Found = TypeVar("Found")


class TraceCache:
    """Opens the user's database for each question and closes it at once: a trace takes seconds, and others wait.

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
