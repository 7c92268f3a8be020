"""How far this process has come, counted where work is done and read by the watchdog. No torch.

One object for the process, because what is counted are the process's own doings, whichever engine does them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """Counters that only grow; `section` is what runs now: `forward`, `backward`, `step` or a section of the script.

    `beats` counts every sign of progress, `calls` those that all ranks make alike (micro-batches, passes, steps), by
    which ranks are compared. `step` is the last optimizer step that ended, over all attempts. `waits_for` are the ranks
    without which this one cannot meet the others.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.calls = 0
        self.step = 0
        self.section = ""
        self.rests = 0
        self.waits_for: tuple[int, ...] = ()

    def beat(self) -> None:
        """Something moved."""
        self.beats += 1

    def call(self) -> None:
        """Something moved that moves on every rank alike."""
        self.calls += 1
        self.beats += 1

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A wait that may last as long as it likes: no hang is suspected inside."""
        self.rests += 1
        try:
            yield
        finally:
            self.rests -= 1
            self.beats += 1

    @contextmanager
    def waiting_for(self, *ranks: int) -> Iterator[None]:
        """A wait that ends when these ranks do something; a hang inside is theirs."""
        self.waits_for = ranks
        try:
            yield
        finally:
            self.waits_for = ()


PULSE = Pulse()
beat = PULSE.beat
resting = PULSE.resting
