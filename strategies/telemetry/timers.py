"""Timers of a step's sections: forward, backward, step and what the script names itself.

On a GPU a section is the time between two events on its stream, read when the figures are asked for: nothing waits for
the device in between. Sections of several micro-batches add up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from strategies.protocols import Observer
from strategies.torch_compat.profiling import profiler_enabled


class Section:
    """A named part of a step, or of the script, in traces and timers: observers and a running profiler know the name.

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
        if profiler_enabled():
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


class HostClock:
    """The process's own time, for devices that compute while the caller waits."""

    def now(self) -> Any:
        """Mark a moment."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments, which may wait until the device has reached the later one."""
        return float(end - start)


class _CudaClock(HostClock):
    """Events on the present stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> HostClock:
    """Return the clock of a device's work."""
    return _CudaClock(device) if device.type == "cuda" else HostClock()


class Timers:
    """Seconds per section since `take` was last called."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._open: dict[str, Any] = {}
        self._closed: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._kept: dict[str, int] = {}

    def starts(self, section: str) -> None:
        """Begin a section; one that an exception left open begins anew."""
        self._open[section] = self._clock.now()

    def ends(self, section: str) -> None:
        """End a section."""
        start = self._open.pop(section, None)
        if start is not None:
            self._closed[section].append((start, self._clock.now()))

    def keep(self) -> None:
        """Keep what has ended so far, whatever is forgotten later."""
        self._kept = {section: len(marks) for section, marks in self._closed.items()}

    def forget(self) -> None:
        """Leave out what has ended since `keep` was last called."""
        for section, marks in list(self._closed.items()):
            del marks[self._kept.get(section, 0) :]
            if not marks:
                del self._closed[section]

    def take(self) -> dict[str, float]:
        """Return seconds of every section that has ended, in the order they first did; the timers begin anew."""
        seconds = {
            section: sum(self._clock.seconds(start, end) for start, end in marks)
            for section, marks in self._closed.items()
        }
        self._closed.clear()
        self._kept = {}
        return seconds
