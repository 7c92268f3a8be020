"""Progress of this process, counted where work is done and read by the watchdog. No torch.

One object for the process, because what is counted are the process's own doings, whichever engine does them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

BEAT_SECONDS = 1.0
"""Between heartbeats that the watchdog publishes, or an eighth of a shorter time to hang."""

# Whose code a frame of the stack runs.


_ROOM = Path(__file__).resolve().parents[1]
_NOT_OWN = (
    *(_ROOM.parent / room for room in ("dsplan", "strategies", "planner", "hardware_db")),
    Path(os.__file__).resolve().parent,
)


@cache
def is_own(filename: str) -> bool:
    """Return whether a file is the script's or of a package beside it, not an installed one, Python's or dsplan's."""
    path = Path(filename)
    if not path.is_absolute() or {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_OWN)


def main_frame() -> FrameType | None:
    """Return where the main thread stands, seen from any thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def script_line(frame: FrameType | None) -> str:
    """Return the script's innermost line from a frame outwards, as `train.py, line 12`; empty where there is none."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


# How far the process has come.


_KEPT = 8
"""Meetings of which another rank can read, equal ones in a row as one: where ranks parted is found among them."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A call in which every rank takes part: those of a process are numbered, and alike on all ranks."""

    number: int
    """Counted from 1."""
    last: int
    """The number of the last one of the same kind and place in a row."""
    kind: str
    """`forward`, `evaluation` (without gradients), `backward`, `step`, or what the script calls."""
    place: str
    """The script's line."""


class Pulse:
    """Counters that only grow; `section` is what runs now: `forward`, `backward`, `step` or a section of the script.

    It is empty in between, and always where the script has no engine (`has_engine`) to name it.

    `beats` counts every sign of progress, `calls` those that all ranks make alike (micro-batches, passes, steps), by
    which ranks are compared. `step` is the last optimizer step that ended, over all attempts. `waits_for` are the ranks
    without which this one cannot meet the others. `meetings` are the last calls that every rank makes alike because
    they gather sharded tensors from all; inside another such call, and `apart`, none is noted.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.calls = 0
        self.step = 0
        self.section = ""
        self.has_engine = False
        self.rests = 0
        self.waits_for: tuple[int, ...] = ()
        self.meetings: deque[Meeting] = deque(maxlen=_KEPT)
        self.depth = 0
        self._number = 0

    def beat(self) -> None:
        """Note that something moved."""
        self.beats += 1

    def call(self) -> None:
        """Note that something moved that moves on every rank alike."""
        self.calls += 1
        self.beats += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Wait inside for as long as it takes: no hang is suspected."""
        self.rests += 1
        try:
            yield
        finally:
            self.rests -= 1
            self.beats += 1

    @contextmanager
    def waiting_for(self, *ranks: int) -> Iterator[None]:
        """Wait inside for these ranks; a hang is theirs."""
        self.waits_for = ranks
        try:
            yield
        finally:
            self.waits_for = ()

    def enter(self, kind: str, *, counts: bool = True) -> None:
        """Begin a call in which every rank takes part, if it `counts`; `leave` ends it."""
        self.depth += 1
        if self.depth == 1 and counts:
            self._number += 1
            line, before = script_line(main_frame()), self.meetings[-1] if self.meetings else None
            if before is not None and (before.kind, before.place) == (kind, line):
                self.meetings[-1] = Meeting(before.number, self._number, kind, line)
            else:
                self.meetings.append(Meeting(self._number, self._number, kind, line))

    @property
    def number(self) -> int:
        """Meetings so far, counted from what the ranks agreed on when they made their last model."""
        return self._number

    @property
    def stamp(self) -> int:
        """A number that messages of one meeting have in common, and no others of its time."""
        last = self.meetings[-1] if self.meetings else None
        return 2 * self._number + (last is not None and last.kind in ("forward", "evaluation"))

    def renumber(self, number: int) -> None:
        """Count on from what all ranks have agreed on; what was before is compared with no other rank any more."""
        self._number = number
        self.meetings.clear()

    def leave(self) -> None:
        """End the call that began last."""
        self.depth -= 1

    @contextmanager
    def meeting(self, kind: str) -> Iterator[None]:
        """Call inside what every rank takes part in."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Call inside what the script may call on one rank alone, since weights are whole."""
        depth, self.depth = self.depth, 1000
        try:
            yield
        finally:
            self.depth = depth


PULSE = Pulse()
beat = PULSE.beat
resting = PULSE.resting
