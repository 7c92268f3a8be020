"""A stand-in for a Kubernetes cluster, made for these tests: it is not Kubernetes, and shares no code with it.

It answers the part of the API that `dsplan run --launcher kubernetes` speaks, in the words of the API reference (custom
resources, pods, logs, events, claims, Status), and plays the controllers as far as their documents say: a TrainJob with
the variables of Kubeflow's torch runtime, a JobSet's indexed Job with its podFailurePolicy, a PyTorchJob's master and
workers, Kueue's Workload for a job with a queue. Containers are processes of this machine, whose image is
this checkout and whose volumes are directories of it; all pods have the address 127.0.0.1. When a container's first
process ends all of its others are killed, as the end of a PID namespace does.

Every answer is checked against the API's own OpenAPI document (`api_schemas`); what is not as it says is in
`violations`. A list of pods has in it what jobs were submitted with: containers, volumes, tolerations.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

from tests.strategies.launchers import api_schemas
from tests.strategies.launchers.launched import path_of_a_node

ROOT = Path(__file__).resolve().parents[3]
_SERVED = {
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "pytorchjobs": "kubeflow.org/v1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
}
_QUEUE = "kueue.x-k8s.io/queue-name"
_WORKLOAD = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload"}
_TICK_SECONDS = 0.05
_BACKOFF_LIMIT = 6  # batch/v1
_MARK = "STAND_IN_POD"


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Pod:
    """A pod with one container, whose present process may be the restart of an earlier one."""

    def __init__(self, name: str, index: int, template: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        self.name, self.index, self.template, self.uid = name, index, template, str(uuid.uuid4())
        self.labels, self.created, self.restarts = dict(labels), _now(), 0
        self.container = template["containers"][0]
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[tuple[str, str]] = []
        self.waiting, self.message, self.phase = "ContainerCreating", "", "Pending"
        self.last_exit: int | None = None
        self.restart_at = 0.0
        self.ends_by: float | None = None

    @property
    def is_live(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, environment: Mapping[str, str], directory: Path) -> None:
        self.lines = []
        with contextlib.suppress(KeyError):
            for mount in self.container["volumeMounts"]:
                assert Path(mount["mountPath"]).is_relative_to(directory), "volumes are directories of the test's own"
                Path(mount["mountPath"]).mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [_expanded(word, environment) for word in self.container["command"]],
            cwd=directory,
            env={**environment, _MARK: self.uid},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.phase, self.waiting = "Running", ""
        threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: list[tuple[str, str]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((_now(), line.decode(errors="replace").rstrip("\n")))

    def leave(self) -> None:
        """Begin what a deletion does: SIGTERM, and after the pod's grace SIGKILL."""
        if self.ends_by is None:
            self.ends_by = time.monotonic() + int(self.template.get("terminationGracePeriodSeconds") or 30)
            if self.process is not None and self.is_live:
                self.process.send_signal(signal.SIGTERM)

    def kill_all(self) -> None:
        """Kill whatever of the container is left."""
        for process_id in _marked(self.uid):
            with contextlib.suppress(OSError):
                os.kill(process_id, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def document(self, namespace: str) -> dict[str, Any]:
        state: dict[str, Any] = {"waiting": {"reason": self.waiting, "message": self.message}}
        if self.is_live:
            state = {"running": {"startedAt": self.created}}
        elif self.phase in ("Succeeded", "Failed"):
            state = {
                "terminated": {"exitCode": self.last_exit, "reason": "Completed" if not self.last_exit else "Error"}
            }
        status: dict[str, Any] = {
            "name": self.container["name"],
            "image": self.container["image"],
            "imageID": "",
            "ready": self.is_live,
            "restartCount": self.restarts,
            "state": state,
            "lastState": {} if self.last_exit is None else {"terminated": {"exitCode": self.last_exit}},
        }
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": namespace,
            "uid": self.uid,
            "labels": self.labels,
            "creationTimestamp": self.created,
        }
        if self.ends_by is not None:
            metadata["deletionTimestamp"] = _now()
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {**self.template, "nodeName": f"machine-{self.index}"},
            "status": {"phase": self.phase, "containerStatuses": [status]},
        }


class _Job:
    """A job and what its controllers make of it."""

    def __init__(self, plural: str, document: dict[str, Any]) -> None:
        self.plural, self.document, self.pods = plural, document, list[_Pod]()
        self.failures, self.made, self.port, self.is_active = 0, 0, _free_port(), True
        document["metadata"]["uid"] = str(uuid.uuid4())

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def reference(self) -> dict[str, str]:
        """The job as an owner."""
        names = {name: str(self.document[name]) for name in ("apiVersion", "kind")}
        return {**names, "name": self.name, "uid": str(self.document["metadata"]["uid"])}

    @property
    def queue(self) -> str:
        return str((self.document["metadata"].get("labels") or {}).get(_QUEUE, ""))

    @property
    def _suspended_in(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.document["spec"]
        return spec["runPolicy"] if self.plural == "pytorchjobs" else spec

    @property
    def is_suspended(self) -> bool:
        return bool(self._suspended_in.get("suspend"))

    def suspend(self, value: bool) -> None:
        self._suspended_in["suspend"] = value

    @property
    def ended(self) -> bool:
        return any(one["type"] in ("Complete", "Completed", "Succeeded", "Failed") for one in self.conditions)

    @property
    def conditions(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.document.setdefault("status", {}).setdefault("conditions", [])
        return listed

    def end(self, *, completed: bool, message: str) -> None:
        words = {"trainjobs": "Complete", "jobsets": "Completed", "pytorchjobs": "Succeeded"}
        self.conditions.append(
            {
                "type": words[self.plural] if completed else "Failed",
                "status": "True",
                "reason": "Ended",
                "message": message,
            }
        )

    @property
    def nodes(self) -> int:
        spec = self.document["spec"]
        if self.plural == "trainjobs":
            return int(spec["trainer"].get("numNodes", 1))
        if self.plural == "jobsets":
            return int(spec["replicatedJobs"][0]["template"]["spec"]["parallelism"])
        return sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())

    @property
    def restarts_in_place(self) -> bool:
        return self.plural != "jobsets"  # JobSet's webhook and PyTorchJob's manifest say OnFailure

    def pod(self, index: int) -> _Pod:
        """A new pod of an index, as the controllers write it."""
        self.made += 1
        label = {"batch.kubernetes.io/job-completion-index": str(index)}
        labels = {"jobset.sigs.k8s.io/jobset-name": self.name, "jobset.sigs.k8s.io/replicatedjob-name": "node", **label}
        spec = self.document["spec"]
        if self.plural == "trainjobs":
            template = _train_job_pod(spec)
        elif self.plural == "jobsets":
            template = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        else:
            role = "Master" if index == 0 else "Worker"
            template = spec["pytorchReplicaSpecs"][role]["template"]["spec"]
            labels = {
                "training.kubeflow.org/job-name": self.name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(max(0, index - 1)),
            }
        return _Pod(f"{self.name}-node-0-{index}-{self.made:05d}", index, template, labels)

    def variables(self, index: int) -> dict[str, str]:
        """Return what the controllers add to a container's environment."""
        if self.plural == "jobsets":
            return {}
        if self.plural == "pytorchjobs":
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": str(self.nodes)}
            return {**shared, "RANK": str(index)}
        per_node = str(self.document["spec"]["trainer"].get("numProcPerNode", "auto"))
        return {
            "PET_NNODES": str(self.nodes),
            "PET_NPROC_PER_NODE": per_node,
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(self.port),
        }


class StandInCluster:
    """The cluster, for the time of a `with`; `variables` are what containers' image sets."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self.directory, self._variables = directory, dict(variables)
        self.image, self.claims, self.namespaces = "registry.test/train@sha256:" + 64 * "0", {"runs"}, {"default"}
        self.forbidden: set[str] = set()
        self.is_silent, self.backoff_limit = False, _BACKOFF_LIMIT
        self.served = dict(_SERVED)
        self.jobs: dict[tuple[str, str], _Job] = {}
        self.events: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.violations: list[str] = []
        self._checked: set[str] = set()
        self._made: list[str] = []
        self._lock = threading.RLock()
        self._is_over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def kubeconfig(self) -> Path:
        path = self.directory / "kubeconfig"
        entry = {"cluster": "stand-in", "user": "tester", "namespace": "default"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stand-in",
            "contexts": [{"name": "stand-in", "context": entry}],
            "clusters": [{"name": "stand-in", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "users": [{"name": "tester", "user": {}}],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def __enter__(self) -> StandInCluster:
        self.directory.mkdir(exist_ok=True)
        command = self.directory / "bin" / "dsplan"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsplan "$@"\n')
        command.chmod(0o755)
        self._threads = [
            threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": _TICK_SECONDS}),
            threading.Thread(target=self._control),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for pod in self.pods():
            pod.kill_all()

    # What a test does to it.

    def pods(self) -> list[_Pod]:
        with self._lock:
            return [pod for job in self.jobs.values() for pod in job.pods]

    def pod(self, index: int) -> _Pod:
        return next(pod for pod in self.pods() if pod.index == index and pod.is_live)

    def kill(self, index: int) -> None:
        """End a pod's first process with SIGKILL, and the others with it."""
        process = self.pod(index).process
        assert process is not None
        process.kill()

    def evict(self, index: int) -> None:
        """Delete a pod as a drain does."""
        with self._lock:
            self._event("Pod", self.pod(index).name, "Evicted", "the machine is drained")
            self.pod(index).leave()

    def until_gone(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while any(job == name for _, job in self.jobs):
            assert time.monotonic() < deadline
            time.sleep(_TICK_SECONDS)

    def left(self) -> list[int]:
        """The processes of all containers there have been."""
        return [process for uid in self._made for process in _marked(uid)]

    # Controllers.

    def _control(self) -> None:
        while not self._is_over.wait(_TICK_SECONDS):
            with self._lock:
                for key, job in list(self.jobs.items()):
                    self._reconcile(job)
                    if "deletionTimestamp" in job.document["metadata"] and not job.pods:
                        del self.jobs[key]

    def _reconcile(self, job: _Job) -> None:
        for pod in list(job.pods):
            if pod.ends_by is not None:
                if not pod.is_live or time.monotonic() > pod.ends_by:
                    pod.kill_all()
                    job.pods.remove(pod)
            elif pod.process is not None and not pod.is_live and pod.phase == "Running" and not pod.waiting:
                self._container_ended(job, pod)
            elif pod.waiting == "CrashLoopBackOff" and time.monotonic() >= pod.restart_at and not job.ended:
                pod.restarts += 1
                self._start(job, pod)
        if job.queue:
            job.suspend(not job.is_active)
        if job.is_suspended or "deletionTimestamp" in job.document["metadata"]:
            for pod in job.pods:
                pod.leave()
            return
        if job.ended:
            return
        for index in set(range(job.nodes)) - {pod.index for pod in job.pods if pod.phase != "Failed"}:
            pod = job.pod(index)
            job.pods.append(pod)
            self._made.append(pod.uid)
            self._event("Pod", pod.name, "Scheduled", f"assigned to machine-{index}")
            self._start(job, pod)
        if sum(pod.phase == "Succeeded" for pod in job.pods) == job.nodes:
            job.end(completed=True, message="all jobs have completed")

    def _start(self, job: _Job, pod: _Pod) -> None:
        if pod.container["image"] != self.image:
            pod.waiting, pod.message = "ImagePullBackOff", f'Back-off pulling image "{pod.container["image"]}"'
            self._event("Pod", pod.name, "Failed", "Error: ErrImagePull", kind_of_event="Warning")
            return
        declared = _declared(pod, job)
        environment = {
            **os.environ,
            "PATH": path_of_a_node(self.directory / "bin"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **self._variables,
            **declared,
            **job.variables(pod.index),
        }
        pod.start(environment, self.directory)
        self._event("Pod", pod.name, "Started", "Started container")

    def _container_ended(self, job: _Job, pod: _Pod) -> None:
        assert pod.process is not None
        status = pod.process.wait()
        pod.kill_all()
        pod.last_exit = status if status >= 0 else 128 - status
        if pod.last_exit == 0:
            pod.phase = "Succeeded"
            return
        if job.restarts_in_place:
            job.failures += 1
            pod.waiting, pod.restart_at = "CrashLoopBackOff", time.monotonic() + 0.5
            self._event("Pod", pod.name, "BackOff", "Back-off restarting failed container", kind_of_event="Warning")
        else:
            pod.phase = "Failed"
            action = _policy(job.document, pod.last_exit)
            job.failures += self.backoff_limit + 1 if action == "FailJob" else action == "Count"
        if job.failures > self.backoff_limit:
            job.end(completed=False, message="jobset failed due to one or more job failures")
            for other in job.pods:
                if other.process is not None and other.is_live:
                    other.process.send_signal(signal.SIGTERM)

    def _event(self, kind: str, name: str, reason: str, message: str, *, kind_of_event: str = "Normal") -> None:
        self.events.append(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{name}.{len(self.events):x}", "namespace": "default", "uid": str(uuid.uuid4())},
                "involvedObject": {"kind": kind, "name": name, "namespace": "default"},
                "reason": reason,
                "message": message,
                "type": kind_of_event,
            }
        )

    # The API.

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: object) -> None:
                cluster.requests.append(format % arguments)

            def _answer(self) -> None:
                url = urlparse(self.path)
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                if self.command == "PATCH":
                    assert self.headers["Content-Type"].startswith("application/merge-patch+json")
                if cluster.is_silent:
                    self.close_connection = True
                    return
                try:
                    answer = cluster._route(self.command, url.path, query, body)
                except _Refused as refusal:
                    answer = refusal
                if isinstance(answer, Iterator):
                    self._stream(answer)
                    return
                status = answer.status if isinstance(answer, _Refused) else 201 if self.command == "POST" else 200
                text = answer.text if isinstance(answer, _Refused) else json.dumps(answer)
                cluster._check(text)
                self._send(status, text)

            def _send(self, status: int, text: str) -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json" if text.startswith("{") else "text/plain")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, lines: Iterator[str]) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for line in lines:
                        part = line.encode() + b"\n"
                        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

        return Handler

    def _check(self, text: str, *, is_change: bool = False) -> None:
        """Note where an answer, or a line of a watch, is not as the API's document says."""
        if text.startswith("{") and text not in self._checked:
            self._checked.add(text)
            check = api_schemas.problems_of_change if is_change else api_schemas.problems_of
            self.violations += check(json.loads(text))

    def _route(self, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
        match = re.fullmatch(r"/(?:api/v1|apis/([^/]+/[^/]+))/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(?:/(\w+))?", path)
        if match is None:
            raise _Refused(404, "404 page not found")
        version, namespace, plural, name, part = match.groups()
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method, "get" if name else "list")
        if query.get("watch"):
            verb = "watch"
        resource = f"{plural}/{part}" if part else plural
        if f"{verb} {resource}" in self.forbidden:
            user = f'User "tester" cannot {verb} resource "{resource}" in the namespace "{namespace}"'
            raise _Refused.because(403, "Forbidden", f"{resource} is forbidden: {user}")
        if version is None:
            return self._core(resource, namespace, name, query)
        if plural == "workloads":
            return self._workloads(method, name, body)
        if self.served.get(plural) != version:
            raise _Refused(404, "404 page not found")
        if method == "POST" and namespace not in self.namespaces:
            raise _Refused.because(404, "NotFound", f'namespaces "{namespace}" not found')
        if query.get("dryRun"):
            return body
        return self._custom(method, plural, name or body["metadata"]["name"], body)

    def _custom(self, method: str, plural: str, name: str, body: Any) -> Any:
        with self._lock:
            job = self.jobs.get((plural, name))
            if method == "POST":
                if job is not None:
                    raise _Refused.because(409, "AlreadyExists", f'{plural} "{name}" already exists')
                job = self.jobs[plural, name] = _Job(plural, body)
            elif job is None:
                raise _Refused.because(404, "NotFound", f'{plural} "{name}" not found')
            elif method == "DELETE":
                job.document["metadata"]["deletionTimestamp"] = _now()
            elif method == "PATCH":
                _patch(job.document, body)
            return job.document

    def _workloads(self, method: str, name: str | None, body: Any) -> Any:
        with self._lock:
            queued = {f"workload-{job.name}": job for job in self.jobs.values() if job.queue}
            if method == "PATCH":
                job = queued[name or ""]
                document = {"spec": {"active": job.is_active}}
                _patch(document, body)
                job.is_active = document["spec"]["active"]
                return {**_WORKLOAD, "metadata": {"name": name}, **document}
            items = [
                {**_WORKLOAD, "metadata": {"name": name, "ownerReferences": [job.reference]}}
                for name, job in queued.items()
            ]
            return {**_WORKLOAD, "kind": "WorkloadList", "metadata": {}, "items": items}

    def _core(self, resource: str, namespace: str, name: str | None, query: Mapping[str, str]) -> Any:
        if resource == "persistentvolumeclaims":
            if name not in self.claims or namespace not in self.namespaces:
                raise _Refused.because(404, "NotFound", f'persistentvolumeclaims "{name}" not found')
            return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
        if resource == "events":
            if query.get("watch"):
                return self._watch_events(int(query["resourceVersion"]))
            past = list(self.events)
            metadata = {"resourceVersion": str(len(past))}
            return {"apiVersion": "v1", "kind": "EventList", "metadata": metadata, "items": past}
        if resource == "pods":
            wanted = dict(part.split("=") for part in query["labelSelector"].split(","))
            with self._lock:
                chosen = [pod for pod in self.pods() if wanted.items() <= pod.labels.items()]
                items = [pod.document(namespace) for pod in chosen]
                return {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}
        pod = next((pod for pod in self.pods() if pod.name == name), None)
        if resource != "pods/log" or pod is None:
            raise _Refused.because(404, "NotFound", f'pods "{name}" not found')
        return self._log(pod, query)

    def _log(self, pod: _Pod, query: Mapping[str, str]) -> Iterator[str]:
        assert query["container"] == pod.container["name"]
        assert query["follow"] == query["timestamps"] == "true"
        process, lines = pod.process, pod.lines
        sent = max(0, len(lines) - int(query["tailLines"])) if "tailLines" in query else 0
        while not self._is_over.is_set():
            is_live = process is not None and process.poll() is None
            if not is_live:
                time.sleep(2 * _TICK_SECONDS)  # for the reader of the pipe
            for stamp, text in lines[sent:]:
                yield f"{stamp} {text}"
                sent += 1
            if not is_live:
                return
            time.sleep(_TICK_SECONDS)

    def _watch_events(self, sent: int) -> Iterator[str]:
        while not self._is_over.wait(_TICK_SECONDS):
            while sent < len(self.events):
                line = json.dumps({"type": "ADDED", "object": self.events[sent]})
                self._check(line, is_change=True)
                yield line
                sent += 1


class _Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text

    @classmethod
    def because(cls, status: int, reason: str, message: str) -> _Refused:
        document = {"status": "Failure", "reason": reason, "message": message, "code": status}
        return cls(status, json.dumps({"apiVersion": "v1", "kind": "Status", "metadata": {}, **document}))


def _train_job_pod(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The torch runtime's pod with the trainer's settings and the job's patch in it."""
    trainer = spec["trainer"]
    container = {"name": "node", **{name: trainer[name] for name in ("image", "command", "env") if name in trainer}}
    pod: dict[str, Any] = {"containers": [container]}
    for patch in spec.get("runtimePatches") or []:
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert replicated["name"] == "node"
        changes = dict(replicated["template"]["spec"]["template"]["spec"])
        for change in changes.pop("containers", []):
            assert change["name"] == "node"
            container.update(change)
        pod |= changes
    return pod


def _declared(pod: _Pod, job: _Job) -> dict[str, str]:
    """A container's own variables, with references to those before them."""
    values: dict[str, str] = {}
    for entry in pod.container.get("env") or []:
        if "valueFrom" in entry:
            annotation = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert annotation == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            values[entry["name"]] = str(pod.index)
        else:
            values[entry["name"]] = _expanded(entry["value"], values)
    if values.get("PET_MASTER_ADDR") == f"{job.name}-node-0-0.{job.name}":  # the name service of a JobSet
        values |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(job.port)}
    return values


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Kubernetes' references: `$(NAME)` of a variable that there is, and `$$` for one `$`."""
    pattern = r"\$\$|\$\(([A-Za-z_][\w.-]*)\)"
    return re.sub(pattern, lambda at: "$" if at[0] == "$$" else variables.get(at[1], at[0]), text)


def _policy(document: Mapping[str, Any], status: int) -> str:
    """The action of a JobSet's podFailurePolicy on a container's exit status."""
    for rule in document["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]:
        if status in rule.get("onExitCodes", {}).get("values", []):
            return str(rule["action"])
    return "Count"


def _patch(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """RFC 7396, as far as it is needed."""
    for name, value in changes.items():
        if isinstance(value, dict):
            _patch(document[name], value)
        else:
            document[name] = value


def _marked(uid: str) -> list[int]:
    """The processes of a pod's container."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={uid}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
