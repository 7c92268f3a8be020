"""The signals by which a rank is asked to save and stop. No torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType

from strategies.launch.endings import EndingKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A wish to stop: its kind, and until when (`time.monotonic`) the rank has time."""

    kind: EndingKind
    deadline: float


class StopSignal:
    """Whether this rank was asked to stop, by a signal or by a call; the first request counts."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self._grace_seconds = 0.0

    def listen(self, *, grace_seconds: float) -> None:
        """Note SIGUSR1, and SIGTERM but under torch elastic, which ends ranks with it.

        Only a main thread can; elsewhere nothing is changed.
        """
        self._grace_seconds = grace_seconds
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGUSR1, self._note)
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGTERM, self._note)

    def ask(self, kind: EndingKind, seconds: float | None = None) -> None:
        """Ask this rank to stop within `seconds`; None: what the orders allow."""
        if self.request is None:
            left = self._grace_seconds if seconds is None else seconds
            self.request = Request(kind=kind, deadline=time.monotonic() + left)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask("preempted")


STOP_SIGNAL = StopSignal()
