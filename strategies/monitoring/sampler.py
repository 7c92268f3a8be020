"""Sampler: a thread that looks at the machine every few seconds. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

from strategies.monitoring.machine import Figures, MachineReader


class Sampler:
    """Hands the machine's figures to `take` every `seconds`, from a thread of its own, until `close`."""

    def __init__(self, reader: MachineReader, seconds: float, take: Callable[[Figures], object]) -> None:
        self._reader, self._seconds, self._take = reader, seconds, take
        self._ends = threading.Event()
        self._lock = threading.Lock()
        # A daemon: a script that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name="dsplan-sampler", daemon=True)
        self._thread.start()

    def now(self) -> Figures:
        """The figures of this moment."""
        with self._lock:
            return self._reader.read()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._ends.wait(self._seconds):
            try:
                self._take(self.now())
            except (OSError, psutil.Error):
                continue  # a mount or a /proc that went away may come back
