"""A run as a managed job from start to end: submitted or resumed, followed, cancelled so that nodes save. No torch.

The nodes run `dsplan run`, which supervises their ranks and saves at SIGTERM; SkyPilot starts the job again on other
nodes, which resume from the bucket. What is here sees the job alone, so that any machine that reaches SkyPilot can.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hardware_db.errors import DsplanError
from hardware_db.notices import label_lines
from strategies.launch.grace_period import StopRequests
from strategies.launch.report import COMPLETED, Outcome
from strategies.launch.skypilot.service import Record, SkyPilot
from strategies.launch.submitted_runs import PREEMPTED, FollowedRun, Unanswered, why_hopeless

_REDACTED = "<redacted>"
"""What SkyPilot keeps of a secret."""
_AGAIN = 20
"""Lines with which a log begins that broke off and is read again."""


def submit(service: SkyPilot, document: Mapping[str, Any]) -> Record:
    """Submit a task as a managed job, whose run resumes what one of its name has saved.

    Raises:
        DsplanError: one of that name is at work, or SkyPilot refuses it.
    """
    service.check(document)
    name = str(document["name"])
    earlier = service.find(name)
    if earlier is not None and earlier.is_live:
        raise DsplanError(
            f"managed job {earlier.number} of the name {name} is at work ({earlier.status}); watch it with dsplan watch"
            f" {name} --launcher skypilot, or name another with --sky-name"
        )
    return service.launch(document)


def find_job(service: SkyPilot, name: str, *, with_task: bool = False) -> Record:
    """Return the newest managed job of a name.

    Raises:
        DsplanError: there is none.
    """
    record = service.find(name, with_task=with_task)
    if record is None:
        raise DsplanError(
            f"SkyPilot lists no managed job {name} of yours; what it saved is in its bucket: submit it again with"
            f" --sky-name {name} and its first flags to resume it"
        )
    return record


def resume(service: SkyPilot, name: str) -> Record:
    """Submit the task of a job that has ended again, of whose run the bucket has what was saved; one at work is left.

    Raises:
        DsplanError: there is no such job, it has completed, or this machine lacks what its task takes from one.
    """
    record = find_job(service, name, with_task=True)
    if record.status == "SUCCEEDED":
        raise DsplanError(f"{name}: the run completed, nothing is left to resume; start a new one")
    if record.is_live:
        return record
    again = f"submit it with --sky-name {name} and its first flags"
    # A document that names the job comes before the task's own.
    documents = [document for document in yaml.safe_load_all(record.task) if isinstance(document, dict)]
    task = next((document for document in documents if "run" in document), None)
    if task is None:
        raise DsplanError(f"{name}: SkyPilot has not kept the task; {again}")
    if _REDACTED in record.task:
        raise DsplanError(f"{name}: its task has secrets, which SkyPilot does not keep; {again}")
    directory = task.get("workdir")
    if isinstance(directory, str) and not Path(directory).is_dir():
        raise DsplanError(f"{name}: its directory {directory} is not on this machine; {again} from where it is")
    return service.launch(task)


class FollowedJob(FollowedRun):
    """The log of a job's nodes and what happens to it; of its lines `tail` are given that are there already, or all."""

    def __init__(
        self, service: SkyPilot, record: Record, requests: StopRequests | None, *, tail: int | None = None
    ) -> None:
        super().__init__(record.name, requests)
        self._service, self._number, self._tail = service, record.number, tail
        self._reader: threading.Thread | None = None

    @property
    def _left(self) -> str:
        return f"left; the nodes of {self.name} save and are taken down by themselves"

    def _begin(self) -> None:
        pass  # a log is read when there is one

    def _has_read_all(self) -> bool:
        return self._reader is None or not self._reader.is_alive()

    def _stop(self) -> str:
        self._service.cancel(self._number)
        return f"{self.name} is cancelled; its nodes save and are taken down"

    def _look(self) -> Iterator[str]:
        """Look at the job; yield what has changed, and decide whether that is the end."""
        record = self._service.look(self._number)
        if record is None:
            gone = f"managed job {self._number} is not listed any more"
            self.outcome = Outcome(name="failed", exit_code=1, reason=gone)
            return
        yield from self._say("job", words_on(record))
        if record.status == "RUNNING" or (not record.is_live and self._reader is None):
            self._read()
        if record.status == "SUCCEEDED":
            self.outcome = COMPLETED
        elif record.status == "CANCELLED":
            self.outcome = self._stopped if self._is_stopping else PREEMPTED
        elif not record.is_live:
            self.outcome = _failed(record)

    def _read(self) -> None:
        """Read the log, if nobody does; again where it broke off."""
        if self._reader is not None and self._reader.is_alive():
            return
        tail = self._tail if self._reader is None else _AGAIN
        self._reader = threading.Thread(target=self._read_log, args=(tail,), daemon=True)
        self._reader.start()

    def _read_log(self, tail: int | None) -> None:
        try:
            self._service.read_log(self._number, self._news.put, tail=tail)
        except Unanswered:
            pass  # the look at the job says so
        except DsplanError as problem:
            self._news.put(label_lines(str(problem)))


def words_on(record: Record) -> str:
    """Return a job as it is now in one line."""
    where = f" on {record.nodes} of {record.infra}" if record.nodes and record.infra else ""
    times = "once" if record.recoveries == 1 else f"{record.recoveries} times"
    again = f", recovered {times}" if record.recoveries else ""
    why = f" ({record.reason})" if record.reason and record.is_live else ""
    return f"managed job {record.number}, {record.name}: {record.status}{where}{again}{why}"


def job_to_dict(record: Record, outcome: Outcome | None) -> dict[str, Any]:
    """Return a job as JSON has it."""
    return {
        "schema_version": 1,
        "name": record.name,
        "number": record.number,
        "status": record.status,
        "infra": record.infra or None,
        "nodes": record.nodes or None,
        "recoveries": record.recoveries,
        "reason": (outcome.reason if outcome else "") or record.reason or None,
        "exit_code": outcome.exit_code if outcome else None,
    }


def _failed(record: Record) -> Outcome:
    """Return the outcome of a job that SkyPilot has given up."""
    reasons = (why_hopeless(status, "the nodes' setup") for status in record.exit_statuses)
    hopeless = next(filter(None, reasons), "")
    words = hopeless or record.reason or f"see sky jobs logs --controller {record.number}"
    refused = bool(hopeless) or record.status in ("FAILED_PRECHECKS", "FAILED_SETUP")
    reason = f"managed job {record.number} of {record.name} ended as {record.status}: {words}"
    return Outcome(name="failed", exit_code=2 if refused else 1, reason=reason)
