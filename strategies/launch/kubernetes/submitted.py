"""A run on a cluster from start to end: submitted or resumed, followed, and stopped so that its pods save. No torch.

The pods run `dsplan run`, which supervises the ranks of a node, restarts them, and saves at SIGTERM; the job's own
policy replaces pods. What is here reads and changes the job alone, so that any machine that reaches the cluster can.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.notices import label_lines
from strategies.launch.grace_period import StopRequests
from strategies.launch.kubernetes.cluster import Cluster, Job, Pod
from strategies.launch.report import COMPLETED, Outcome
from strategies.launch.submitted_runs import PREEMPTED, FollowedRun, Unanswered, why_hopeless

_LOOK_SECONDS = 1.0
_GONE_SECONDS = 120.0
"""Longest wait for a job that is deleted to be gone."""
_NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NO_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_ROUTINE = ("Scheduled", "Pulled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete", "Completed")
"""Events that say nothing which the lines on pods do not."""


def submit(cluster: Cluster, manifest: Mapping[str, Any], claim: str) -> Job:
    """Submit a job whose run directory is on a volume that is there.

    Raises:
        DsplanError: it is not, or the cluster refuses the job.
    """
    if not cluster.has_volume(claim):
        cluster.create(manifest, is_trial=True)  # says so where the namespace itself is not there
        raise DsplanError(
            f"namespace {cluster.namespace} has no PersistentVolumeClaim {claim}; create it, or name another with"
            " --kube-volume"
        )
    return cluster.create(manifest)


def find_job(cluster: Cluster, name: str) -> Job:
    """Return the job of a run.

    Raises:
        DsplanError: there is none.
    """
    job = cluster.find(name)
    if job is None:
        raise DsplanError(
            f"namespace {cluster.namespace} has no job {name}; what it saved is on its volume: submit it again with"
            f" --kube-name {name} and its first flags to resume it"
        )
    return job


def resume(cluster: Cluster, name: str) -> Job:
    """Start the pods of a run again, of which the volume has what was saved; a job that runs is left as it is.

    Raises:
        DsplanError: there is no such job, or it has completed.
    """
    job = find_job(cluster, name)
    if job.state == "completed":
        raise DsplanError(f"{name}: the run completed, nothing is left to resume; start a new one")
    if job.state == "failed":
        cluster.delete(job)
        deadline = time.monotonic() + _GONE_SECONDS
        while cluster.find(name, job.kind) is not None:
            if time.monotonic() > deadline:
                raise DsplanError(f"{name}: the job that failed is not deleted after {_GONE_SECONDS:g} s; see kubectl")
            time.sleep(_LOOK_SECONDS)
        return cluster.create(job.renewed())
    if job.is_suspended:
        cluster.suspend(job, suspend=False)
    return find_job(cluster, name)


class FollowedJob(FollowedRun):
    """A job's log and what happens to it; `tail` is how many lines of a log that is there already are given, or all."""

    def __init__(self, cluster: Cluster, job: Job, requests: StopRequests | None, *, tail: int | None = None) -> None:
        super().__init__(job.name, requests)
        self._cluster, self._job, self._tail = cluster, job, tail
        self._logs: dict[tuple[str, int], _Log] = {}

    @property
    def _left(self) -> str:
        return f"left; the pods of {self.name} save and end by themselves"

    def _begin(self) -> None:
        threading.Thread(target=self._watch_events, daemon=True).start()

    def _has_read_all(self) -> bool:
        return all(log.has_ended for log in self._logs.values())

    def _stop(self) -> str:
        self._cluster.suspend(self._job, suspend=True)
        return f"{self.name} is suspended; its pods save and end"

    def _look(self) -> Iterator[str]:
        """Look at job and pods; yield what has changed, and decide whether that is the end."""
        job = self._cluster.find(self._job.name, self._job.kind)
        if job is None or job.uid != self._job.uid:
            self.outcome = Outcome(name="failed", exit_code=1, reason=f"the job {self._job.name} was deleted")
            return
        pods = self._cluster.pods(job)
        yield from self._say("job", _words_on_job(job, pods))
        for pod in pods:
            yield from self._say(pod.uid, _words_on_pod(pod))
            if pod.node == 0 and pod.has_begun:
                self._read(pod)
        self.outcome = self._end(job, pods)

    def _end(self, job: Job, pods: list[Pod]) -> Outcome | None:
        """Return how the run has ended; None where it goes on."""
        if job.state == "completed":
            return COMPLETED
        hopeless = next(filter(None, map(_why_hopeless, pods)), "")
        if job.state == "failed":
            return Outcome(name="failed", exit_code=2 if hopeless else 1, reason=hopeless or _why_failed(job, pods))
        if not any(pod.is_live for pod in pods):
            if self._is_stopping and job.is_suspended:
                return self._stopped
            return PREEMPTED if job.state == "suspended" else None
        if self._requests is None or self._is_stopping or not hopeless:
            return None
        self._cluster.delete(job)
        return Outcome(name="failed", exit_code=2, reason=f"{hopeless}; the job {job.name} is deleted")

    # Threads that read what the cluster sends.

    def _read(self, pod: Pod) -> None:
        """Follow the log of a pod's present container, if that is not done yet; again where the stream broke off."""
        log = self._logs.setdefault((pod.uid, pod.restarts), _Log())
        if log.is_read or (log.thread is not None and log.thread.is_alive()):
            return
        tail, self._tail = self._tail, None
        log.thread = threading.Thread(target=self._read_log, args=(pod, log, tail), daemon=True)
        log.thread.start()

    def _read_log(self, pod: Pod, log: _Log, tail: int | None) -> None:
        try:
            for stamp, text in self._cluster.log(pod, self._job.kind, tail=tail):
                if stamp > log.until:
                    log.until = stamp
                    self._news.put(text)
            log.is_read = True
        except DsplanError as problem:
            # Of a pod that has been replaced nothing more can be read, and one that is there is asked again.
            log.is_read = not isinstance(problem, Unanswered)

    def _watch_events(self) -> None:
        """Pass on what happens to this job's objects, once each; ends with the command."""
        own = re.compile(rf"(^|-){re.escape(self._job.name)}($|-)")
        seen: set[tuple[str, str, str]] = set()
        while self.outcome is None:
            try:
                for event in self._cluster.events():
                    about, reason = event["involvedObject"], str(event.get("reason") or "")
                    key = (str(about.get("uid")), reason, str(event.get("message") or ""))
                    if key in seen or reason in _ROUTINE or not own.search(str(about.get("name") or "")):
                        continue
                    seen.add(key)
                    words = " ".join(f"{about.get('kind')} {about.get('name')}: {reason}: {key[2]}".split())
                    self._news.put(label_lines(words))
            except Unanswered:
                pass  # the look at the job says so
            except DsplanError as problem:
                self._news.put(label_lines(f"events are not shown: {problem}"))
                return
            time.sleep(_LOOK_SECONDS)


class _Log:
    """A container's log, as far as it has been read."""

    def __init__(self) -> None:
        self.until = ""
        self.is_read = False
        self.thread: threading.Thread | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_read or self.thread is None or not self.thread.is_alive()


def status_lines(job: Job, pods: list[Pod]) -> list[str]:
    """Return a job and its pods as they are now, a line each."""
    return [_words_on_job(job, pods) or f"{job.kind} {job.name}: {job.state}", *map(_words_on_pod, pods)]


def job_to_dict(job: Job, pods: list[Pod], outcome: Outcome | None) -> dict[str, Any]:
    """Return a job and its pods as JSON has them."""
    return {
        "schema_version": 1,
        "name": job.name,
        "kind": job.kind,
        "queue": job.queue or None,
        "state": job.state,
        "reason": (outcome.reason if outcome else "") or job.reason or None,
        "exit_code": outcome.exit_code if outcome else None,
        "pods": [
            {"name": pod.name, "node": pod.node, "host": pod.host, "phase": pod.phase, "restarts": pod.restarts}
            for pod in pods
        ],
    }


def _words_on_job(job: Job, pods: list[Pod]) -> str:
    if job.state in ("completed", "failed"):
        return f"{job.kind} {job.name}: {job.state}"
    if job.state == "waiting":
        return f"{job.kind} {job.name}: waits in queue {job.queue}"
    if job.state == "suspended":
        return f"{job.kind} {job.name}: suspended"
    return f"{job.kind} {job.name}: {sum(pod.phase == 'Running' for pod in pods)} pods run"


def _words_on_pod(pod: Pod) -> str:
    where = f" on {pod.host}" if pod.host else ""
    times = "once" if pod.restarts == 1 else f"{pod.restarts} times"
    again = f", restarted {times}" if pod.restarts else ""
    waits = f", {pod.waits_for}" if pod.waits_for not in ("", "ContainerCreating", "PodInitializing") else ""
    leaves = ", is being ended" if pod.is_leaving and pod.is_live else ""
    ended = "" if pod.is_live or pod.exit_status is None else f" with status {pod.exit_status}"
    return f"pod {pod.name}{where}: {pod.phase}{ended}{waits}{leaves}{again}"


def _why_hopeless(pod: Pod) -> str:
    """Return why a pod will never train; empty where it may."""
    if pod.waits_for in _NO_IMAGE:
        return f"pod {pod.name}: no image ({pod.message or pod.waits_for}); name another with --kube-image"
    if pod.waits_for in _NO_CONTAINER:
        return f"pod {pod.name}: its container cannot be started ({pod.message or pod.waits_for})"
    reason = why_hopeless(pod.exit_status, "the image")
    return f"pod {pod.name} ended with status {pod.exit_status}: {reason}" if reason else ""


def _why_failed(job: Job, pods: list[Pod]) -> str:
    pod = next((pod for pod in pods if pod.exit_status), None)
    last = f"; pod {pod.name} ended with status {pod.exit_status}" if pod is not None else ""
    return f"the job {job.name} failed: {job.reason or 'the cluster says no more'}{last}"
