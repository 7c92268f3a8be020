"""A stand-in for SkyPilot's API server and clouds, made for these tests: SkyPilot's own client speaks to it.

It answers the requests for managed jobs as SkyPilot 0.14.1 does, with SkyPilot's own encoders, and SkyPilot's parser
judges every task. Nodes are directories of this machine, a home each; a node's command is the script that SkyPilot's
own `make_task_bash_script` makes of the task's `run`, with SkyPilot's variables. It plays the jobs controller as far as
its code says (`sky/jobs/controller.py`, `sky/core.py`): a lost node's job is ended on the others
(SIGTERM to all of its processes, after 30 s SIGKILL) and starts on new nodes with empty disks; a command that fails
ends the job unless its status is in `recover_on_exit_codes`; before nodes are taken down the `down` hooks run on the
first. No setup is run, no bucket is mounted, nothing is rented.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import psutil

from tests.strategies.launchers.launched import path_of_a_node

ROOT = Path(__file__).resolve().parents[3]
_TICK_SECONDS, _KILL_SECONDS = 0.05, 30.0  # sky/skylet/subprocess_daemon.py
_MARK = "STAND_IN_NODE"


class _Node:
    """A node with its disk, and the command on it."""

    def __init__(self, job: _Job, rank: int, directory: Path) -> None:
        self.rank, self.home, self.id = rank, directory, str(uuid.uuid4())
        self._job, self.process = job, None
        work = directory / "sky_workdir"
        work.parent.mkdir(parents=True)
        if isinstance(job.task.workdir, str):
            shutil.copytree(job.task.workdir, work, ignore=shutil.ignore_patterns("nodes", "run"))
        else:
            work.mkdir()

    def start(self) -> None:
        from sky.skylet import log_lib

        variables = {
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * self._job.task.num_nodes),
            "SKYPILOT_NUM_NODES": str(self._job.task.num_nodes),
            "SKYPILOT_NODE_RANK": str(self.rank),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_TASK_ID": f"sky-managed-{self._job.name}_{self._job.number}-0",
            **self._job.task.envs,
        }
        script = self.home / "sky_app"
        script.write_text(log_lib.make_task_bash_script(self._job.task.run, env_vars=variables))
        self.process = subprocess.Popen(
            ["/bin/bash", "-i", str(script)],
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace")
            if "job control" not in text and "terminal process group" not in text:  # log_lib.run_with_log
                self._job.log.append(f"(node, rank={self.rank}, pid={process.pid}) {text}")

    @property
    def environment(self) -> dict[str, str]:
        return {**self._job.server.variables, "HOME": str(self.home), _MARK: self.id}

    @property
    def ended(self) -> int | None:
        """The exit status of the command as a shell says it, once it has ended."""
        status = None if self.process is None else self.process.poll()
        return 128 - status if status is not None and status < 0 else status

    def processes(self) -> list[psutil.Process]:
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.id and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def hook(self, event: str) -> None:
        """Run the hooks of an event, as `sky/skylet/hook_executor.py` does."""
        for hook in next(iter(self._job.task.resources)).hooks or []:
            if event in hook["events"]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(hook["run"], shell=True, env=self.environment, timeout=hook["timeout"])


class _Job:
    """A managed job, and its controller."""

    def __init__(self, server: StandInSkyPilot, number: int, task: Any, text: str) -> None:
        self.server, self.number, self.task, self.text = server, number, task, text
        self.name, self.status, self.reason = task.name, "PENDING", ""
        self.log: list[str] = []
        self.nodes: list[_Node] = []
        self.recoveries, self.is_cancelled, self.lost = 0, False, set[int]()
        recovery = next(iter(task.resources)).job_recovery or {}
        self.recovers_on = recovery.get("recover_on_exit_codes", [])
        self.thread = threading.Thread(target=self._control, daemon=True)
        self.thread.start()

    def _control(self) -> None:
        while self._rent_and_wait():
            self.recoveries += 1
        self._take_down()

    def _rent_and_wait(self) -> bool:
        """Run the command on new nodes; return whether it is to be run again."""
        self.status = "STARTING" if not self.recoveries else "RECOVERING"
        home = self.server.directory / "nodes"
        self.lost.clear()
        self.nodes = [
            _Node(self, rank, home / f"{self.number}-{self.recoveries}-{rank}") for rank in range(self.task.num_nodes)
        ]
        for node in self.nodes:
            node.start()
        self.status = "RUNNING"
        while not self.server.is_over.wait(_TICK_SECONDS):
            if self.is_cancelled:
                self.status = "CANCELLING"
                self.nodes[0].hook("down")
                self.status = "CANCELLED"
                return False
            if self.lost:
                self.status = "RECOVERING"
                self._end_the_others()
                self._take_down()
                return True
            ends = [node.ended for node in self.nodes]
            if all(status == 0 for status in ends):
                self.status = "SUCCEEDED"
                return False
            if any(ends):
                # The driver ends what is left, whose status is then that of SIGKILL (sky/backends/task_codegen.py).
                return self._failed([137 if status is None else status for status in ends])
        return False

    def _failed(self, codes: list[int]) -> bool:
        """Act on nodes whose command has failed, as the job's driver and its controller do."""
        self._end_the_others()
        if any(code in self.recovers_on for code in codes):
            self._take_down()
            return True
        ends = f"exit code {codes[0]}" if len(codes) == 1 else f"exit codes {codes}"
        where = f"To see the details, run: sky jobs logs --controller {self.number}"
        self.reason = f"Job exited with {ends} (user program failure). {where}"
        self.status = "FAILED"
        return False

    def _end_the_others(self) -> None:
        for node in self.nodes:
            node.signal_all(signal.SIGTERM)
        deadline = time.monotonic() + _KILL_SECONDS
        while any(node.processes() for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)

    def _take_down(self) -> None:
        for node in self.nodes:
            node.signal_all(signal.SIGKILL)
            if node.process is not None:
                node.process.wait()
            shutil.rmtree(node.home, ignore_errors=True)

    def row(self) -> dict[str, Any]:
        return {
            "job_id": self.number,
            "task_id": 0,
            "job_name": self.name,
            "status": self.status,
            "recovery_count": self.recoveries,
            "infra": "Stand-in (here)",
            "cluster_resources": f"{self.task.num_nodes}x(directory)",
            "failure_reason": self.reason or None,
            "details": None,
            "submitted_at": 0.0,
            "user_yaml": self.text,
        }


class StandInSkyPilot:
    """The server, for the time of a `with`; `image` are variables that the nodes' image sets."""

    def __init__(self, directory: Path, image: Mapping[str, str]) -> None:
        self.directory = directory
        binaries = directory / "bin"
        own = {"PATH": path_of_a_node(binaries), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.variables = {**os.environ, **own, **image}
        self.jobs: list[_Job] = []
        self.is_over, self.is_silent, self.refuses = threading.Event(), False, ""
        self._answers: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def client_variables(self) -> dict[str, str]:
        """The environment of a client: a home of its own, and this as its local server."""
        return {
            "HOME": str(self.directory / "client"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self._server.server_port),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        }

    def __enter__(self) -> StandInSkyPilot:
        (self.directory / "client").mkdir(parents=True)
        command = self.directory / "bin" / "dsplan"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsplan "$@"\n')
        command.chmod(0o755)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": _TICK_SECONDS}).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for job in self.jobs:
            job.thread.join(timeout=60)
            for node in job.nodes:
                node.signal_all(signal.SIGKILL)

    # What a test does to it.

    def lose(self, rank: int) -> None:
        """Take a node away as a spot market does: all of its processes get SIGKILL, and its disk is gone."""
        job = self.jobs[-1]
        job.nodes[rank].signal_all(signal.SIGKILL)
        job.lost.add(rank)

    def warn(self, rank: int) -> None:
        """Announce to a node that it will be taken away: its hooks run, as they do on Kubernetes."""
        self.jobs[-1].nodes[rank].hook("preemption")

    def left(self) -> list[psutil.Process]:
        return [process for job in self.jobs for node in job.nodes for process in node.processes()]

    # The API.

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def _answer(self) -> None:
                url = urlparse(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                if service.is_silent:
                    self.close_connection = True
                    return
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                headers, answer = service._route(url.path, query, body)
                if isinstance(answer, Iterator):
                    self._stream(headers, answer)
                    return
                data = json.dumps(answer).encode()
                failed = isinstance(answer, dict) and answer.get("detail")
                self._begin(400 if failed else 200, headers)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _begin(self, status: int, headers: Mapping[str, str]) -> None:
                import sky
                from sky.server import constants

                self.send_response(status)
                versions = {constants.API_VERSION_HEADER: str(constants.API_VERSION)}
                for name, value in {**versions, constants.VERSION_HEADER: sky.__version__, **headers}.items():
                    self.send_header(name, value)

            def _stream(self, headers: Mapping[str, str], lines: Iterator[str]) -> None:
                self._begin(200, headers)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for line in lines:
                        part = line.encode()
                        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = _answer  # noqa: N815

        return Handler

    def _route(self, path: str, query: Mapping[str, str], body: dict[str, Any]) -> tuple[dict[str, str], Any]:
        import sky
        from sky import exceptions
        from sky.server import constants
        from sky.utils import dag_utils

        if path == "/api/health":
            own = {"version": sky.__version__, "version_on_disk": sky.__version__, "commit": sky.__commit__}
            return {}, {"status": "healthy", "api_version": str(constants.API_VERSION), **own}
        if path == "/validate":
            dag_utils.load_dag_from_yaml_str(body["dag"])
            if self.refuses:
                return {}, {"detail": exceptions.serialize_exception(ValueError(self.refuses))}
            return {}, {}
        if path == "/api/get":
            return {}, self._answers[query["request_id"]]
        if path == "/api/stream":
            return {constants.STREAM_REQUEST_HEADER: query["request_id"]}, iter(["launching on the stand-in\n"])
        if path == "/jobs/launch":
            task = dag_utils.load_dag_from_yaml_str(body["task"]).tasks[0]
            text = dag_utils.dump_dag_to_yaml_str(
                dag_utils.load_dag_from_yaml_str(body["task"]), use_user_specified_yaml=True
            )
            job = _Job(self, len(self.jobs) + 1, task, text)
            self.jobs.append(job)
            return self._request("jobs.launch", ([job.number], None)), {}
        if path == "/jobs/queue/v2":
            wanted = [job for job in self.jobs if body.get("job_ids") is None or job.number in body["job_ids"]]
            if body.get("name_match"):
                wanted = [job for job in wanted if body["name_match"] in job.name]
            fields = {*body["fields"], "job_id", "status"}
            rows = [{name: value for name, value in job.row().items() if name in fields} for job in wanted]
            return self._request("jobs.queue_v2", _records(rows)), {}
        if path == "/jobs/cancel":
            for job in self.jobs:
                job.is_cancelled |= job.number in body["job_ids"]
            return self._request("jobs.cancel", None), {}
        assert path == "/jobs/logs", path
        return self._request("jobs.logs", 0), self._follow(body["job_id"], body.get("tail"))

    def _request(self, name: str, value: Any) -> dict[str, str]:
        """Answer a request at once; the header with its number."""
        from sky.server.requests import payloads, requests

        number = str(uuid.uuid4())
        request = requests.Request(
            request_id=number,
            name=f"sky.{name}",
            entrypoint=print,
            request_body=payloads.RequestBody(),
            status=requests.RequestStatus.SUCCEEDED,
            created_at=0.0,
            user_id="tester",
        )
        request.set_return_value(value)
        self._answers[number] = request.encode().model_dump()
        return {"X-Skypilot-Request-ID": number}

    def _follow(self, number: int, tail: int | None) -> Iterator[str]:
        job = self.jobs[number - 1]
        position = max(0, len(job.log) - tail) if tail else 0
        while not self.is_over.is_set():
            has_ended = not job.thread.is_alive()
            while position < len(job.log):
                yield job.log[position]
                position += 1
            if has_ended:
                return
            time.sleep(_TICK_SECONDS)


def _records(rows: list[dict[str, Any]]) -> tuple[list[Any], int, dict[str, int], int]:
    from sky.jobs import ManagedJobStatus
    from sky.schemas.api.responses import ManagedJobRecord

    records = [ManagedJobRecord(**{**row, "status": ManagedJobStatus(row["status"])}) for row in rows]
    return records, len(records), {}, len(records)
