"""Runs that report themselves to a database which several people share, and pages of them. No torch.

A run reports what `dsplan watch --runs` shows of it, and no command line, path, environment or last words: an error
of a script may quote anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from hardware_db.errors import DsplanError
from hardware_db.files import DATABASE, canonical_json, digest, server_address
from hardware_db.notices import printable
from hardware_db.store import Store, open_store
from hardware_db.store.reports import Origin, StatusReport, own_origin
from strategies.launch.run_status import (
    PlanInUse,
    RunFollower,
    RunsFollower,
    RunStatus,
    in_order,
    run_directories,
)
from strategies.run_directory.spec import LaunchSpec

REPORT_SECONDS = 15.0
"""Between two reports of a run. A thousand runs are then 67 rows per second."""
SILENT_SECONDS = 60.0
"""After so long without a report nobody knows whether a run goes on: four were to come."""
MOST_RUNS = 200
"""On a page: those that were heard of last."""
_LAST_SECONDS = 6.0
"""How long a run that is over waits for its last report: a server that is away is given up after five."""
_ALIKE = {item.name for item in fields(RunStatus)} & {item.name for item in fields(StatusReport)} - {"name"}
"""Fields that a run's status and its report have in common."""


class RunReporter:
    """A thread beside the ranks that reports a run to the database that `DSPLAN_DATABASE` names, and to no other.

    The run neither waits for it nor fails with it; what is wrong is one line, once.
    """

    def __init__(self, spec: LaunchSpec, every_seconds: float = REPORT_SECONDS) -> None:
        self._follower, self._every_seconds = RunFollower(spec.directory), every_seconds
        self._id = spec.run_id or digest(spec.run_directory, 32)
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._unsaid: SimpleQueue[str] = SimpleQueue()
        self._has_complained = False

    def start(self) -> None:
        """Start it, once; where nobody has named a database nothing is started."""
        if self._thread is None and os.environ.get(DATABASE, "").strip():
            self._thread = threading.Thread(target=self._report_to_the_end, name="dsplan-reports", daemon=True)
            self._thread.start()

    def remarks(self) -> list[str]:
        """Return the lines that people are to read since the last call."""
        return [self._unsaid.get() for _ in range(self._unsaid.qsize())]

    def finish(self, *, in_a_hurry: bool) -> Iterator[str]:
        """Wait for the report of the run's end, but for seconds only."""
        self.close()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)
        yield from self.remarks()

    def close(self) -> None:
        """Have it report once more, and end."""
        self._is_over.set()

    def _report_to_the_end(self) -> None:
        is_last = False
        while True:
            status = self._follower.look()
            if status is not None:
                self._report(status)
            if is_last:
                return
            is_last = self._is_over.wait(self._every_seconds)

    def _report(self, status: RunStatus) -> None:
        try:
            with open_store() as store:
                store.report(to_report(status, self._id, own_origin()))
        except DsplanError as problem:
            if not self._has_complained:
                self._has_complained = True
                reason = " ".join(str(problem).split())
                self._unsaid.put(f"this run is missing on the team's page, and is tried again: {reason}")


def to_report(status: RunStatus, id: str, origin: Origin) -> StatusReport:
    """Return what a run reports of itself."""
    plan = status.plan or PlanInUse(model="", strategy="", backend="", precision="")
    return StatusReport(
        id=id,
        name=_plain(status.name),
        user=_plain(origin.user),
        host=_plain(origin.host),
        model=_plain(Path(plan.model).name),  # weights of one's own are called by their path
        strategy=plan.strategy,
        backend=plan.backend,
        precision=plan.precision,
        alerts_json=canonical_json(dict(status.alerts)),
        **_alike(status),
    )


def _plain(text: str) -> str:
    """Return a name as every database takes it: a file's may have bytes that are no text."""
    return printable(text.encode(errors="replace").decode())


def from_report(report: StatusReport) -> RunStatus:
    """Return a reported run as it is now, as far as anybody can tell."""
    status = RunStatus(
        directory=None,
        name=report.name,
        plan=PlanInUse(model=report.model, strategy=report.strategy, backend=report.backend, precision=report.precision)
        if report.strategy
        else None,
        alerts=report.alerts,
        origin=Origin(user=report.user, host=report.host),
        **_alike(report),
    )
    if not status.is_alive:
        return status
    ago = report.heard_seconds_ago
    if ago > SILENT_SECONDS:
        return replace(status, state="silent", quiet_seconds=None)
    return replace(
        status,
        checkpoint_age_seconds=_later(status.checkpoint_age_seconds, ago),
        quiet_seconds=_later(status.quiet_seconds, ago),
    )


def _alike(value: RunStatus | StatusReport) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _ALIKE}


def _later(seconds: float | None, ago: float) -> float | None:
    return None if seconds is None else seconds + ago


# Pages of many runs.


class Runs(Protocol):
    """Many runs, looked at again and again."""

    def look(self) -> tuple[RunStatus, ...]:
        """Return every run as it is now: those that go on first, the newest first of each.

        Raises:
            DsplanError: what tells of them cannot be read.
        """


class ReportedRuns:
    """The runs that a database tells of."""

    def __init__(self, open_database: Callable[[], Store]) -> None:
        self._open_database = open_database

    def look(self) -> tuple[RunStatus, ...]:
        """Return the `MOST_RUNS` runs that were heard of last, as they are now.

        Raises:
            DsplanError: the database cannot be read.
        """
        with self._open_database() as store:
            return in_order(map(from_report, store.reports(MOST_RUNS)))


def runs_at(where: str | Path) -> Runs:
    """Return the runs below a folder, or those that the database of an address or a file tells of.

    Raises:
        DsplanError: it is no folder, and no database that can be read.
    """
    address = server_address(str(where), "--runs")
    path = Path(where)
    if address is None and not path.is_file():
        run_directories(path)
        return RunsFollower(path)
    if address is None:
        runs = ReportedRuns(lambda: open_store(path))
    else:
        from hardware_db.store.postgres import PostgresStore

        runs = ReportedRuns(lambda: PostgresStore(address, "--runs"))
    runs.look()
    return runs
