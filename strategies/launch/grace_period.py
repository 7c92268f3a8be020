"""Requests to stop: signals of people and batch systems to `dsplan run`, and the time that they leave. No torch."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

GRACE_SECONDS = 30.0
"""Time to save before the ranks are ended: what SLURM's KillWait, Kubernetes' terminationGracePeriodSeconds and most
spot markets leave at the least."""
SIGNAL_SECONDS = 1.0
"""Between requests to ranks to save and stop, which are made until they do."""
_PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequests:
    """Signals are noted instead of acted on, wherever they arrive: also in the code that shows an event.

    Ctrl-C sets `interrupted_at`, SIGTERM, SIGUSR1 and the SIGHUP of a closed terminal set `preempted_at`, the times of
    `time.monotonic` at which the first came; nohup's runs continue. A second Ctrl-C asks for an end without saving.
    Only a main thread gets signals; elsewhere nothing is changed. `superseded` is why a run is to end here at once that
    another machine has resumed; empty: none has.
    """

    def __init__(self) -> None:
        self.interrupted_at: float | None = None
        self.at_once = False
        self.preempted_at: float | None = None
        self.superseded = ""
        self._superseded_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def came(self) -> bool:
        """True if the run is to stop."""
        return self.since is not None

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C asked for it."""
        return self.interrupted_at is not None

    @property
    def since(self) -> float | None:
        """Time of `time.monotonic` since which the run is to stop."""
        moments = (self.interrupted_at, self.preempted_at, self._superseded_at)
        return min((at for at in moments if at is not None), default=None)

    def supersede(self, why: str) -> None:
        """Have the run end at once, without saving, as another machine has resumed it; of any thread."""
        self.superseded, self.at_once, self._superseded_at = why, True, time.monotonic()

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
            for number in _PREEMPTING:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._preempt)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.at_once = self.interrupted
        if self.interrupted_at is None:
            self.interrupted_at = time.monotonic()

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.preempted_at is None:
            self.preempted_at = time.monotonic()


def _leave_terminal() -> None:
    """Let what this process still says go nowhere where it went to a terminal, which would refuse it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            # A terminal that is gone is not one any more: nothing but the number of its device tells.
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
