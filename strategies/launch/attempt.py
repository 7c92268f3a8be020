"""One attempt: every rank started once and watched until all have ended. No torch."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from strategies.launch.causes import Ending, ending_of, forget_last_attempt
from strategies.launch.endings import STOPS
from strategies.launch.events import OutputLine
from strategies.launch.launcher import Launcher, make_launcher
from strategies.launch.memory_kills import memory_kills
from strategies.launch.run_files import RunFiles
from strategies.launch.settings import SAVING
from strategies.launch.spec import LaunchSpec
from strategies.launch.stop_requests import StopRequests
from strategies.monitoring.alerts import Alert
from strategies.monitoring.follow import AlertFollower

# A look at the run's files takes 0.4 ms of a processor that the ranks may need.
_POLL_SECONDS = 0.25
_SIGNAL_SECONDS = 1.0

Happening = OutputLine | Alert | dict[str, Any]
"""A line, an alert, or a row of metrics."""


class Attempt:
    """Iterate `happenings()` to its end; then `completed` says whether every rank ended with 0, and `ending` why not.

    `ending` is None also for an attempt that Ctrl-C ended.
    """

    def __init__(self, spec: LaunchSpec, files: RunFiles, alerts: AlertFollower, requests: StopRequests) -> None:
        self._spec, self._files, self._alerts, self._requests = spec, files, alerts, requests
        self._signalled = float("-inf")
        self.completed = False
        self.ending: Ending | None = None

    def happenings(self) -> Iterator[Happening]:
        """Start the ranks and tell what they write until they have ended, by themselves or because they were to."""
        forget_last_attempt(self._spec.directory)
        kills = memory_kills()
        self._files.begin_attempt()
        status: int | None = None
        with make_launcher(self._spec) as launcher:
            while (status := launcher.poll()) is None and not self._is_over(launcher):
                yield from self._news(final=False)
                for text in launcher.remarks():
                    yield OutputLine(rank=0, stream="stderr", text=text)
                time.sleep(_POLL_SECONDS)
        yield from self._news(final=True)
        self._conclude(status, memory_killed=memory_kills() > kills)

    def _is_over(self, launcher: Launcher) -> bool:
        """Whether to end the ranks now; asks them to save and stop where there is time for it."""
        asked = self._requests.preempted_at
        if self._requests.interrupted or asked is None:
            return self._requests.interrupted
        now = time.monotonic()
        if self._spec.kind not in SAVING or now - asked > self._spec.supervision.grace_seconds:
            return True
        if now - self._signalled >= _SIGNAL_SECONDS:
            launcher.signal(signal.SIGUSR1)
            self._signalled = now
        return False

    def _conclude(self, status: int | None, *, memory_killed: bool) -> None:
        self.completed = status == 0
        if self.completed or self._requests.interrupted:
            return
        found = None if status is None else ending_of(self._spec.directory, status, memory_killed=memory_killed)
        self.ending = found if self._requests.preempted_at is None else _preempted(found)

    def _news(self, *, final: bool) -> Iterator[Happening]:
        yield from self._files.news(final=final)
        yield from self._alerts.read(final=final)


def _preempted(found: Ending | None) -> Ending:
    """The ending of an attempt that was asked to stop, whatever its ranks made of that."""
    if found is not None and found.kind in STOPS:
        return replace(found, kind="preempted")
    said = f"; {found.reason}" if found is not None and found.kind not in ("killed", "lost") else ""
    return Ending(kind="preempted", reason=f"the ranks were ended without saving{said}")
