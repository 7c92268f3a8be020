"""Section: a part of a step, or of the script, that has a name in traces and timers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from strategies.protocols import Observer


class Section:
    """Inside, something runs that observers and a running profiler know by name.

    A class instead of a generator, and a record only where a profiler runs: three sections a step, each entered with
    cold caches, otherwise took as long as all that is measured in them. One that an exception leaves has no end.
    """

    __slots__ = ("_name", "_observers", "_record")

    def __init__(self, observers: Sequence[Observer], name: str) -> None:
        self._observers, self._name = observers, name
        self._record: Any = None

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.starts(self._name)
        if _profiler_enabled():
            self._record = torch.profiler.record_function(self._name)
            self._record.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
            self._record = None
        if kind is None:
            for observer in self._observers:
                observer.ends(self._name)
