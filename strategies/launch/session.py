"""One run from start to end: start the ranks, tell what happens, say how it ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from planner.plan import Plan
from planner.plan_io import plan_from_dict, save_plan
from strategies.launch.events import Event, OutputLine, PlanMade, StepDone
from strategies.launch.launcher import make_launcher
from strategies.launch.outcome import Outcome, judge
from strategies.launch.spec import LaunchSpec, log_path
from strategies.launch.tail import LineFollower
from strategies.metrics import MeasuredRun, metrics_path, parse_row, read_metrics, summarise

PLAN_FILE = "plan.yaml"
_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run was asked to do, how it ended, and what it measured. `plan` is None where nothing was planned."""

    spec: LaunchSpec
    outcome: Outcome
    measured: MeasuredRun
    plan: Plan | None


class _InterruptNoted:
    """Ctrl-C is noted instead of raised, wherever it arrives: also in the code that shows an event. A second one
    raises.

    Only a main thread gets signals; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.came = False

    def __enter__(self) -> _InterruptNoted:
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_main:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            signal.default_int_handler(number, frame)
        self.came = True


class RunSession:
    """A launched run. Iterate `events()` to its end, then ask for the `report()`.

    A plan that the ranks make is kept as `plan.yaml` in the run directory, to run again with `--plan`.
    """

    def __init__(self, spec: LaunchSpec, plan: Plan | None = None) -> None:
        self._spec = spec
        self._plan = plan
        self._outcome: Outcome | None = None
        self._metrics = LineFollower(metrics_path(spec.directory, 0))
        self._logs = [
            (rank, stream, LineFollower(log_path(spec.directory, rank, stream)))
            for rank in range(spec.processes)
            for stream in ("stdout", "stderr")
            if stream == "stderr" or rank == 0
        ]

    def events(self) -> Iterator[Event]:
        """Start the ranks and give their lines, plan and steps until they ended. Ctrl-C ends them all."""
        status = None
        self._spec.save()
        with _InterruptNoted() as interrupt:
            with make_launcher(self._spec) as launcher:
                while not interrupt.came and (status := launcher.poll()) is None:
                    yield from self._new_events(final=False)
                    time.sleep(_POLL_SECONDS)
            yield from self._new_events(final=True)
        if interrupt.came:
            self._outcome = Outcome(name="interrupted", exit_code=130)
        else:
            self._outcome = judge(self._spec.directory, self._spec.processes, status or 0)

    def report(self) -> RunReport:
        """The finished run.

        Raises:
            RuntimeError: `events()` has not ended.
        """
        if self._outcome is None:
            raise RuntimeError("the run has not ended")
        measured = summarise(read_metrics(self._spec.directory, self._spec.processes))
        return RunReport(spec=self._spec, outcome=self._outcome, measured=measured, plan=self._plan)

    def _new_events(self, *, final: bool) -> Iterator[Event]:
        for line in self._metrics.read_lines(final=final):
            row = parse_row(line)
            if row is not None:
                yield from self._metric_event(row)
        for rank, stream, follower in self._logs:
            for line in follower.read_lines(final=final):
                yield OutputLine(rank=rank, stream="stdout" if stream == "stdout" else "stderr", text=line)

    def _metric_event(self, row: dict[str, Any]) -> Iterator[Event]:
        if row.get("event") == "plan":
            plan = {key: value for key, value in row.items() if key != "event"}
            self._plan = plan_from_dict(plan)
            save_plan(self._plan, self._spec.directory / PLAN_FILE)
            yield PlanMade(plan=plan)
        elif row.get("event") == "step":
            yield StepDone(
                step=int(row["step"]),
                loss=row.get("loss"),
                seconds=float(row["seconds"]),
                samples=int(row.get("samples") or 0),
                tokens=int(row.get("tokens") or 0),
                peak_bytes=int(row.get("peak_bytes") or 0),
                rss_bytes=int(row.get("rss_bytes") or 0),
            )


def run_directory(parent: Path, script: Path) -> Path:
    """A new directory for one run under `parent`, named after the time and the script."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = parent / (f"{stamp}-{script.stem}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(path)
