"""Whether this process gets on, as far as another thread of it can see.

A rank that waits in a collective, in a lock or in `sleep` does nothing; one that evaluates, compiles or reads data
works outside the engine's sight, and must not be taken for hung. Three signs tell them apart: the pulse; the main
thread's processor time together with a stack that moves (a thread that spins in a driver call uses its processor and
stands still); and the processor time of child processes, which compile and load data.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import psutil

from strategies.supervised.pulse import Pulse

_BUSY = 0.05
"""Share of a processor from which on a thread, or the children together, are at work."""


class Activity:
    """Looks at the process now and then; every look tells whether something happened since the one before."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._main = threading.main_thread().ident
        self._beats, self._stack = -1, 0
        self._looked_at = time.monotonic()
        self._own_seconds = self._main_seconds()
        self._children_seconds: float | None = None

    def is_there(self, *, with_children: bool) -> bool:
        """Whether the process got on since the last look. Children are looked at on demand, as finding them is slow."""
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        beats, stack, seconds = self._pulse.beats, self._main_stack(), self._main_seconds()
        moved = beats != self._beats
        # Before the first step a script loads and downloads, which may take its time with little of the processor's.
        share = _BUSY if self._pulse.step else 0.0
        works = stack != self._stack and seconds - self._own_seconds >= share * passed
        self._beats, self._stack, self._own_seconds = beats, stack, seconds
        return moved or works or self._pulse.rests > 0 or self._children_work(passed, look=with_children)

    def _main_stack(self) -> int:
        """A number that changes when the main thread goes on to another instruction, in any of its frames."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        places = []
        while frame is not None:
            places.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return hash(tuple(places))

    def _main_seconds(self) -> float:
        if self._main is None or not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time()
        return time.clock_gettime(time.pthread_getcpuclockid(self._main))

    def _children_work(self, passed: float, *, look: bool) -> bool:
        before, self._children_seconds = self._children_seconds, _seconds_of_children() if look else None
        if before is None or self._children_seconds is None:
            return False
        return self._children_seconds - before >= _BUSY * passed


def _seconds_of_children() -> float:
    total = 0.0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
