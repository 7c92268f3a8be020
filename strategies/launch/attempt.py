"""One attempt: every rank started once and watched until all have ended. No torch."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.notices import label_lines
from hardware_db.probe.cgroup import memory_kills
from strategies.launch.failure_causes import Ending, ending_of, forget_last_attempt
from strategies.launch.grace_period import SIGNAL_SECONDS, StopRequests
from strategies.launch.launchers.launcher import Launcher, make_launcher
from strategies.launch.policy import Decision
from strategies.run_directory.claim import LEFT_TO_SCRIPT, claimed_kind, saves_itself
from strategies.run_directory.spec import SAVING, STOPS, LaunchSpec
from strategies.telemetry.alerts import Alert
from strategies.telemetry.follow import AlertFollower, LineFollower
from strategies.telemetry.metrics import parse_row

# Events of a run, as values that a view can draw.


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLine:
    """A line a rank wrote."""

    rank: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMade:
    """The plan in use, as the dictionary of the JSON contract."""

    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """One optimizer step on the first rank here, with the samples and tokens of that rank's own batches."""

    step: int
    loss: float | None
    seconds: float
    samples: int
    tokens: int
    peak_bytes: int
    rss_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnded:
    """An attempt did not complete: why, and what follows."""

    attempt: int
    ending: Ending
    decision: Decision


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIsBack:
    """The first step after a restart is done; `seconds_lost` is None if it cannot be known.

    With `counts_anew` the step is the attempt's own: the script loads its own checkpoint, and does not say which.
    """

    step: int
    seconds_lost: float | None
    counts_anew: bool = False


Event = OutputLine | PlanMade | StepDone | Alert | AttemptEnded | RunIsBack


# Follow the ranks' files in a run directory: their output, and the metrics of the first rank.


_OUTPUT = re.compile(r"rank(\d+)\.(stdout|stderr)\.log")
_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")


class RunFiles:
    """News in the files of a run directory, by which it also shows which ranks run here.

    What the files hold when this begins is an earlier command's, and is not printed again. Files are opened only when
    they have grown: this is called ten times a second beside ranks that need the processors.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followers: dict[str, LineFollower] = {}
        self._seen: dict[str, int] = {}
        self._leader: int | None = None
        self._refusals: set[str] = set()
        self._metrics_start: dict[str, int] = {}
        for name, size in self._sizes().items():
            if _OUTPUT.fullmatch(name):
                self._followers[name] = LineFollower(directory / name, offset=size)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Metrics from here on belong to a new attempt, whose first rank may be another."""
        self._leader = None
        self._refusals.clear()
        self._metrics_start = {name: size for name, size in self._sizes().items() if _METRICS.fullmatch(name)}

    def news(self, *, final: bool = False) -> Iterator[OutputLine | dict[str, Any]]:
        """Yield new rows of metrics, of the lowest rank that wrote any in this attempt, then new lines.

        Lines are stderr of every rank and stdout of rank 0; what all ranks refuse alike is given once.
        """
        sizes = self._sizes()
        yield from self._rows(sizes, final=final)
        for name in sorted(sizes):
            match = _OUTPUT.fullmatch(name)
            if match and (match[2] == "stderr" or match[1] == "0"):
                stream: Literal["stdout", "stderr"] = "stdout" if match[2] == "stdout" else "stderr"
                for line in self._lines(name, sizes[name], final=final):
                    if line.startswith("error: "):
                        if line in self._refusals:
                            continue
                        self._refusals.add(line)
                    yield OutputLine(rank=int(match[1]), stream=stream, text=line)

    def _rows(self, sizes: Mapping[str, int], *, final: bool) -> Iterator[dict[str, Any]]:
        grown = [
            int(match[1])
            for name, size in sizes.items()
            if (match := _METRICS.fullmatch(name)) and size > self._metrics_start.get(name, 0)
        ]
        if not grown:
            return
        name = f"metrics-rank{min(grown)}.jsonl"
        if self._leader != min(grown):
            self._leader = min(grown)
            self._followers[name] = LineFollower(self._directory / name, offset=self._metrics_start.get(name, 0))
            self._seen.pop(name, None)
        for line in self._lines(name, sizes[name], final=final):
            row = parse_row(line)
            if row is not None:
                yield row

    def _lines(self, name: str, size: int, *, final: bool) -> list[str]:
        if self._seen.get(name) == size and not final:
            return []
        self._seen[name] = size
        return self._followers.setdefault(name, LineFollower(self._directory / name)).read_lines(final=final)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files of the directory that are followed."""
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.stat().st_size
                for entry in entries
                if _OUTPUT.fullmatch(entry.name) or _METRICS.fullmatch(entry.name)
            }


# A look at the run's files takes 0.4 ms of a processor that the ranks may need.
_POLL_SECONDS = 0.25

Happening = OutputLine | Alert | dict[str, Any]
"""A line, an alert, or a row of metrics."""


class Attempt:
    """Iterate `happenings()` to its end; then `completed` says whether every rank ended with 0, and `ending` why not.

    `ending` is None also for an attempt that Ctrl-C ended. `remarks` gives what else there is to say each time that it
    is called.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        files: RunFiles,
        alerts: AlertFollower,
        requests: StopRequests,
        remarks: Callable[[], list[str]],
    ) -> None:
        self._spec, self._files, self._alerts, self._requests = spec, files, alerts, requests
        self._remarks = remarks
        self._signalled = float("-inf")
        self._was_told = False
        self.completed = False
        self.ending: Ending | None = None

    def happenings(self) -> Iterator[Happening]:
        """Start the ranks and print what they write until they have ended, by themselves or because they were to."""
        forget_last_attempt(self._spec.directory)
        kills = memory_kills()
        self._files.begin_attempt()
        status: int | None = None
        with make_launcher(self._spec) as launcher:
            while (status := launcher.poll()) is None and not self._is_over(launcher):
                yield from self._news(final=False)
                for text in (*launcher.remarks(), *map(label_lines, self._remarks()), *self._words_of_interrupt()):
                    yield OutputLine(rank=0, stream="stderr", text=text)
                time.sleep(_POLL_SECONDS)
        yield from self._news(final=True)
        self._conclude(status, memory_killed=memory_kills() > kills)

    def _is_over(self, launcher: Launcher) -> bool:
        """Return whether to end the ranks now; asks them to save and stop where there is time for it."""
        since, now = self._requests.since, time.monotonic()
        if since is None:
            return False
        is_late = self._requests.at_once or now - since > self._spec.supervision.grace_seconds
        if is_late or claimed_kind(self._spec.directory) not in SAVING:
            return True
        if now - self._signalled >= SIGNAL_SECONDS:
            launcher.signal(signal.SIGUSR1)
            self._signalled = now
        return False

    def _words_of_interrupt(self) -> Iterator[str]:
        """Yield once what Ctrl-C has the ranks do."""
        if self._requests.interrupted and not self._was_told:
            self._was_told = True
            yield label_lines("saving and stopping; Ctrl-C again ends the run at once")

    def _conclude(self, status: int | None, *, memory_killed: bool) -> None:
        self.completed = status == 0
        if self._requests.superseded and not self.completed:
            self.ending = Ending(kind="refused", reason=self._requests.superseded)
            return
        if self.completed or self._requests.interrupted:
            return
        ending = None if status is None else ending_of(self._spec.directory, status, memory_killed=memory_killed)
        self.ending = (
            ending if self._requests.preempted_at is None else describe_preemption(ending, self._spec.directory)
        )

    def _news(self, *, final: bool) -> Iterator[Happening]:
        yield from self._files.news(final=final)
        yield from self._alerts.read(final=final)


def describe_preemption(ending: Ending | None, directory: Path) -> Ending:
    """Return the ending of an attempt that was asked to stop, whatever its ranks made of that."""
    if ending is not None and ending.kind in STOPS:
        return replace(ending, kind="preempted")
    reason = f"; {ending.reason}" if ending is not None and ending.kind not in ("killed", "lost") else ""
    unsaved = LEFT_TO_SCRIPT if saves_itself(directory) else "the ranks were ended without saving"
    return Ending(kind="preempted", reason=unsaved + reason)
