"""SkyPilot's managed jobs through its Python SDK: launched, looked at, read and cancelled. No torch.

The SDK, not the command: `sky jobs launch` says the job's number in prose alone, and `sky jobs queue --output json` has
no task in it, which a run is resumed from. Calls, fields and statuses are those of SkyPilot 0.14.1:
`sky/jobs/client/sdk.py`, `sky/schemas/api/responses.py` (ManagedJobRecord), `sky/jobs/state.py` (ManagedJobStatus).
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hardware_db.errors import DsplanError
from strategies.errors import BackendMissing
from strategies.launch.submitted_runs import Unanswered

_FIELDS = (
    *("job_id", "task_id", "job_name", "status", "recovery_count", "infra", "cluster_resources"),
    *("failure_reason", "details", "submitted_at"),
)
_TASK_FIELD = "user_yaml"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXIT_CODES = re.compile(r"exit codes? \[?([\d, ]+)")
_ENDED = ("SUCCEEDED", "CANCELLED")
"""Statuses of a job that has ended; every other begins with FAILED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A managed job as it is now."""

    number: int
    """Its job id, which SkyPilot counts."""
    name: str
    status: str
    """As SkyPilot says it: PENDING, STARTING, RUNNING, RECOVERING, CANCELLING, SUCCEEDED, CANCELLED, FAILED..."""
    infra: str
    """Cloud and region of its nodes; empty before it has some."""
    nodes: str
    """Its nodes, as SkyPilot lists them; empty before it has some."""
    recoveries: int
    reason: str
    """SkyPilot's words on why it failed or waits; empty where there are none."""
    task: str
    """The task's YAML, without what is secret in it; empty where it was not asked for."""

    @property
    def is_live(self) -> bool:
        """True until it has ended."""
        return self.status not in _ENDED and not self.status.startswith("FAILED")

    @property
    def exit_statuses(self) -> tuple[int, ...]:
        """The exit statuses of its command on the nodes, as far as SkyPilot says them."""
        match = _EXIT_CODES.search(self.reason)
        return () if match is None else tuple(int(number) for number in match[1].replace(",", " ").split())


class SkyPilot:
    """The API server that `sky api info` names, or one on this machine, which SkyPilot starts.

    Raises:
        BackendMissing: SkyPilot is not installed.
        DsplanError: every method, in one line, where SkyPilot refuses.
        Unanswered: every method, where its server does not answer.
    """

    def __init__(self) -> None:
        if find_spec("sky") is None:
            raise BackendMissing(
                "SkyPilot is not installed here; pip install 'skypilot>=0.14.1', or leave out --launcher"
            )
        # Its log goes to the standard output that there is at the import; dsplan's own is for the run, or for JSON.
        with contextlib.redirect_stdout(sys.stderr):
            import sky
            import sky.exceptions
            from sky import jobs
        self._sky, self._jobs = sky, jobs

    def check(self, document: Mapping[str, Any]) -> Any:
        """Return the document of a task as SkyPilot's own value."""
        read = self._sky.Task.from_yaml_config
        return self._call("take the task", lambda: read(copy.deepcopy(dict(document))))

    def launch(self, document: Mapping[str, Any]) -> Record:
        """Submit a managed job; what SkyPilot prints about that goes to standard error."""
        task, name = self.check(document), str(document["name"])

        def submit() -> Any:
            with contextlib.redirect_stdout(sys.stderr):
                request = self._jobs.launch(task, name=name)
                return self._sky.stream_and_get(request, output_stream=sys.stderr)

        numbers = self._call(f"launch {name}", submit)[0]
        record = self.look(int(numbers if isinstance(numbers, int) else numbers[0]))
        if record is None:
            raise DsplanError(f"SkyPilot has taken the job {name} and does not list it; see sky jobs queue")
        return record

    def find(self, name: str, *, with_task: bool = False) -> Record | None:
        """Return the newest job of a name; None where there is none."""
        records = [record for record in self._queue(with_task=with_task, name_match=name) if record.name == name]
        return max(records, key=lambda record: record.number, default=None)

    def look(self, number: int) -> Record | None:
        """Return the job of a number; None where there is none."""
        return next((record for record in self._queue(job_ids=[number]) if record.number == number), None)

    def cancel(self, number: int) -> None:
        """Have the job's nodes taken down, on which the run saves before."""
        self._call(f"cancel job {number}", lambda: self._sky.get(self._jobs.cancel(job_ids=[number])))

    def read_log(self, number: int, line: Callable[[str], None], *, tail: int | None = None) -> None:
        """Hand on the lines of the job's nodes up to its end, over all recoveries."""
        out = _Lines(line)
        read = self._jobs.tail_logs
        self._call("read the log", lambda: read(job_id=number, follow=True, tail=tail, output_stream=out))

    def _queue(self, *, with_task: bool = False, **which: Any) -> list[Record]:
        fields = [*_FIELDS, *([_TASK_FIELD] if with_task else [])]

        def ask() -> Any:
            try:
                # A controller that has stopped for want of jobs is started where a job is to be resumed anyway.
                return self._sky.get(self._jobs.queue_v2(refresh=with_task, fields=fields, **which))[0]
            except self._sky.exceptions.ClusterNotUpError:  # there is none, or no job that has not ended
                return []

        return [_record(row) for row in self._call("list jobs", ask)]

    def _call(self, doing: str, function: Callable[[], Any]) -> Any:
        import requests

        try:
            return function()
        except (self._sky.exceptions.ApiServerConnectionError, requests.exceptions.RequestException) as problem:
            raise Unanswered(
                f"SkyPilot's API server does not answer ({_one_line(problem)}); see sky api info"
            ) from None
        except Exception as problem:
            # SkyPilot's own errors have no common class, and those of the schema are ValueError.
            is_theirs = type(problem).__module__.startswith("sky.") or isinstance(problem, (ValueError, RuntimeError))
            if isinstance(problem, DsplanError) or not is_theirs:
                raise
            raise DsplanError(f"SkyPilot does not {doing}: {_one_line(problem)}") from None


class _Lines(io.TextIOBase):
    """A stream that hands on whole lines, without colours."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line, self._rest = line, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = re.split(r"[\r\n]", self._rest + _COLOURS.sub("", text))
        for line in lines:
            if line:
                self._line(line)
        return len(text)


def _record(row: Any) -> Record:
    status = getattr(row.status, "value", row.status)
    return Record(
        number=int(row.job_id),
        name=str(row.job_name or ""),
        status=str(status or "PENDING"),
        infra="" if row.infra in (None, "-") else str(row.infra),
        nodes="" if row.cluster_resources in (None, "-") else str(row.cluster_resources),
        recoveries=int(row.recovery_count or 0),
        reason=_one_line(row.failure_reason or row.details or ""),
        task=str(row.user_yaml or ""),
    )


def _one_line(problem: object) -> str:
    return " ".join(_COLOURS.sub("", str(problem)).split())[:500]
