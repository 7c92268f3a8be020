"""A namespace of a Kubernetes cluster: its training jobs, their pods, logs and events. No torch.

Through the official `kubernetes` client, whose answers are read as the JSON that they are: its models differ from
release to release. Sources: the Kubernetes API reference (Pod, Event, PersistentVolumeClaim, Status), and of the jobs
those in `planner/emit/kubernetes.py`; labels of pods are JobSet's, Job's and the training operator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hardware_db.errors import DsplanError
from planner.emit.kubernetes import API_VERSIONS, CONTAINERS, QUEUE_LABEL
from planner.vocabulary import JOB_KINDS, JobKind
from strategies.errors import BackendMissing

_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
_QUIET_SECONDS = 600.0
"""After which a stream that says nothing is opened again: its other end may be gone unseen."""
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PLURALS: dict[JobKind, str] = {"TrainJob": "trainjobs", "PyTorchJob": "pytorchjobs", "JobSet": "jobsets"}
_JOB_LABELS: dict[JobKind, str] = {
    "TrainJob": "jobset.sigs.k8s.io/jobset-name={},jobset.sigs.k8s.io/replicatedjob-name=node",
    "PyTorchJob": "training.kubeflow.org/job-name={}",
    "JobSet": "jobset.sigs.k8s.io/jobset-name={},jobset.sigs.k8s.io/replicatedjob-name=node",
}
_INDEX = "batch.kubernetes.io/job-completion-index"
_ENDS = {"Complete": "completed", "Completed": "completed", "Succeeded": "completed", "Failed": "failed"}
"""Conditions of the three kinds that end a job."""
ROLE = "the Role of scripts/examples/kubernetes/role.yaml"

JobState = Literal["waiting", "running", "suspended", "completed", "failed"]


class Unanswered(DsplanError):
    """The cluster does not answer now; it may a moment later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod of a job, and its container that trains."""

    name: str
    uid: str
    node: int
    """The node's number in the job, from 0."""
    host: str
    """The machine that it is on; empty before it is scheduled."""
    phase: str
    """As Kubernetes says it: Pending, Running, Succeeded, Failed."""
    restarts: int
    has_begun: bool
    """Whether the present container has run, so that it has a log."""
    is_leaving: bool
    """Whether it is being deleted."""
    waits_for: str
    """Reason for which its container does not run, such as ImagePullBackOff; empty where there is none."""
    message: str
    """What the cluster says of that."""
    exit_status: int | None
    """Of the container that ended last; None before one has."""

    @property
    def is_live(self) -> bool:
        """True while its container runs or may."""
        return self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job as it is now."""

    kind: JobKind
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name, which is the run's."""
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its identity, other than that of an earlier one of its name."""
        return str(self.document["metadata"].get("uid", ""))

    @property
    def queue(self) -> str:
        """Kueue's queue that it waits in; empty: none."""
        return str((self.document["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))

    @property
    def state(self) -> JobState:
        """Its state, of its conditions; `running` says that nothing else is said."""
        for word, end in _ENDS.items():
            if word in self._true:
                return "completed" if end == "completed" else "failed"
        if self.is_suspended:
            return "waiting" if self.queue else "suspended"
        return "running"

    @property
    def reason(self) -> str:
        """The cluster's words on its end; empty before."""
        condition = next((self._true[word] for word in _ENDS if word in self._true), {})
        return str(condition.get("message") or condition.get("reason") or "")

    @property
    def is_suspended(self) -> bool:
        """True if it is to have no pods now."""
        spec = self.document["spec"]
        return bool((spec.get("runPolicy") or {} if self.kind == "PyTorchJob" else spec).get("suspend"))

    @property
    def _true(self) -> dict[str, Mapping[str, Any]]:
        conditions = (self.document.get("status") or {}).get("conditions") or []
        return {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}

    def renewed(self) -> dict[str, Any]:
        """Return the manifest of the same job, to be created again."""
        metadata = self.document["metadata"]
        spec = json.loads(json.dumps(self.document["spec"]))
        (spec.get("runPolicy") or {} if self.kind == "PyTorchJob" else spec).pop("suspend", None)
        kept = {name: metadata[name] for name in ("name", "labels") if metadata.get(name)}
        return {"apiVersion": API_VERSIONS[self.kind], "kind": self.kind, "metadata": kept, "spec": spec}


class Cluster:
    """One namespace, by a context of the kubeconfig, by default the present one, or from within a pod.

    Raises:
        BackendMissing: the client is not installed.
        DsplanError: there is no kubeconfig, or no such context. Every method, in one line, where the cluster refuses.
        Unanswered: every method, where it does not answer.
    """

    def __init__(self, context: str | None, namespace: str | None) -> None:
        if find_spec("kubernetes") is None:
            raise BackendMissing(
                "the Kubernetes client is not installed here; pip install 'dsplan[kubernetes]', or leave out --launcher"
            )
        from kubernetes import client

        connection, own_namespace = _connect(context)
        self.namespace = namespace or own_namespace
        self._host = connection.configuration.host
        self._core, self._objects = client.CoreV1Api(connection), client.CustomObjectsApi(connection)

    # Jobs.

    def create(self, manifest: Mapping[str, Any], *, is_trial: bool = False) -> Job:
        """Submit a job; a trial only has the cluster judge it."""
        kind: JobKind = manifest["kind"]
        words = (*self._coordinates(kind), dict(manifest))
        options: dict[str, Any] = {"dry_run": "All"} if is_trial else {}
        create = self._objects.create_namespaced_custom_object
        document = self._ask(f"create {_PLURALS[kind]}", create, *words, **options)
        return Job(kind=kind, document=document)

    def find(self, name: str, kind: JobKind | None = None) -> Job | None:
        """Return the job of a name, of whichever kind where none is given; None where there is none."""
        for candidate in JOB_KINDS if kind is None else (kind,):
            get = self._objects.get_namespaced_custom_object
            document = self._ask(f"get {_PLURALS[candidate]}", get, *self._coordinates(candidate), name, may_miss=True)
            if document is not None:
                return Job(kind=candidate, document=document)
        return None

    def suspend(self, job: Job, *, suspend: bool) -> None:
        """Have the job's pods saved and ended, or started again; one in a queue through Kueue, which owns the field."""
        workloads = ("kueue.x-k8s.io", "v1beta1", self.namespace, "workloads")
        if names := self._workloads(job, workloads):
            address, change = workloads, {"active": not suspend}
        else:
            address, names, change = self._coordinates(job.kind), [job.name], {"suspend": suspend}
        spec: dict[str, Any] = {"runPolicy": change} if address[-1] == "pytorchjobs" else change
        patch = self._objects.patch_namespaced_custom_object
        content: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
        for name in names:
            self._ask(f"patch {address[-1]}", patch, *address, name, {"spec": spec}, **content)

    def _workloads(self, job: Job, address: tuple[str, ...]) -> list[str]:
        """Return Kueue's names for a job; none where it is in no queue, or nobody looks after that."""
        if not job.queue:
            return []
        listed = self._ask("list workloads", self._objects.list_namespaced_custom_object, *address, may_miss=True)
        items = [] if listed is None else listed["items"]
        return [item["metadata"]["name"] for item in items if _is_owned(item, job.uid)]

    def delete(self, job: Job) -> None:
        """Delete the job once its pods have ended; one that is gone already is what was wanted."""
        delete = self._objects.delete_namespaced_custom_object
        options: dict[str, Any] = {"propagation_policy": "Foreground"}
        self._ask(
            f"delete {_PLURALS[job.kind]}", delete, *self._coordinates(job.kind), job.name, may_miss=True, **options
        )

    def _coordinates(self, kind: JobKind) -> tuple[str, str, str, str]:
        group, version = API_VERSIONS[kind].split("/")
        return group, version, self.namespace, _PLURALS[kind]

    # Their pods, with logs and events.

    def pods(self, job: Job) -> list[Pod]:
        """Return the job's pods by number, the newest of each number first."""
        selector = _JOB_LABELS[job.kind].format(job.name)
        listed = self._ask("list pods", self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        items = sorted(listed["items"], key=lambda item: str(item["metadata"].get("creationTimestamp")), reverse=True)
        return sorted((_pod(item, job.kind) for item in items), key=lambda pod: pod.node)

    def log(self, pod: Pod, kind: JobKind, *, tail: int | None = None) -> Iterator[tuple[str, str]]:
        """Yield time and text of a container's lines, up to its end."""
        options: dict[str, Any] = {"container": CONTAINERS[kind], "follow": True, "timestamps": True}
        options |= {} if tail is None else {"tail_lines": tail}
        for line in self._stream(
            "get pods/log", self._core.read_namespaced_pod_log, pod.name, self.namespace, **options
        ):
            stamp, _, text = line.partition(" ")
            yield stamp, text

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield what happened in the namespace of late, then what happens, until the cluster ends the stream."""
        now = self._ask("list events", self._core.list_namespaced_event, self.namespace)
        yield from now["items"]
        options = {"watch": True, "resource_version": now["metadata"]["resourceVersion"]}
        for line in self._stream("watch events", self._core.list_namespaced_event, self.namespace, **options):
            change = json.loads(line) if line else {}
            if change.get("type") in ("ADDED", "MODIFIED"):
                yield change["object"]

    def has_volume(self, claim: str) -> bool:
        """Return whether the namespace has a PersistentVolumeClaim."""
        read = self._core.read_namespaced_persistent_volume_claim
        return self._ask("get persistentvolumeclaims", read, claim, self.namespace, may_miss=True) is not None

    # How it is asked.

    def _ask(
        self, doing: str, function: Callable[..., Any], *words: Any, may_miss: bool = False, **options: Any
    ) -> Any:
        """Return the answer's JSON; None for what is not there where it may miss."""
        status, body = self._call(function, *words, **options)
        if status == 404 and may_miss:
            return None
        if status >= 300:
            raise DsplanError(self._refusal(status, body, doing))
        return json.loads(body)

    def _stream(self, doing: str, function: Callable[..., Any], *words: Any, **options: Any) -> Iterator[str]:
        from urllib3.exceptions import HTTPError

        answer = self._open(function, *words, timeout=(_CONNECT_SECONDS, _QUIET_SECONDS), **options)
        if isinstance(answer, tuple):
            status, body = answer
            raise DsplanError(self._refusal(status, body, doing))
        rest = b""
        try:
            for part in answer.stream(amt=None, decode_content=False):
                *lines, rest = (rest + part).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except HTTPError as problem:
            raise Unanswered(self._silence(problem)) from None
        finally:
            answer.release_conn()

    def _call(self, function: Callable[..., Any], *words: Any, **options: Any) -> tuple[int, str]:
        answer = self._open(function, *words, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS), **options)
        return answer if isinstance(answer, tuple) else (answer.status, answer.data.decode(errors="replace"))

    def _open(self, function: Callable[..., Any], *words: Any, timeout: tuple[float, float], **options: Any) -> Any:
        """Return the open answer; status and text of a refusal."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = function(*words, _preload_content=False, _request_timeout=timeout, **options)
        except ApiException as problem:
            return int(problem.status or 0) or 500, _text(problem.body)
        except HTTPError as problem:
            raise Unanswered(self._silence(problem)) from None
        return answer if answer.status < 300 else (answer.status, answer.data.decode(errors="replace"))

    def _silence(self, problem: Exception) -> str:
        reason = getattr(problem, "reason", None) or problem
        words = str(reason).rpartition(": ")[2]
        return f"{self._host}: the cluster does not answer ({words}); see kubectl cluster-info, or name --kube-context"

    def _refusal(self, status: int, body: str, doing: str) -> str:
        """Return one line on a refusal: what was asked, what the cluster says, what to do."""
        message = _message(body)
        if status == 401:
            return f"{self._host}: the cluster does not know who asks (401); renew the credentials of the kubeconfig"
        if "admission webhook" in message:
            return f"the cluster refuses to {doing}: {message}"
        if status == 403:
            return f"may not {doing} in namespace {self.namespace} (403); have somebody bind {ROLE}"
        if status == 404 and "namespaces" in message:
            return f"namespace {self.namespace}: no such namespace in this cluster; name one with --kube-namespace"
        if status == 404 and ("could not find the requested resource" in message or "page not found" in message):
            return f"the cluster has no {doing.split()[-1]}; install what serves them, or choose another --kube-kind"
        if status == 409:
            return f"cannot {doing}: {message}; name another with --kube-name, or resume it with --resume NAME"
        return f"cannot {doing} ({status}): {message}"


def _connect(context: str | None) -> tuple[Any, str]:
    """Return the client's connection, and the namespace that it is set to."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, active = config.list_kube_config_contexts()
        connection = config.new_client_from_config(context=context)
    except (ConfigException, OSError, ValueError, TypeError) as problem:
        if context is None and _OWN_NAMESPACE.exists():
            config.load_incluster_config()
            return client.ApiClient(), _OWN_NAMESPACE.read_text().strip()
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DsplanError(f"no cluster to submit to: {why}; set KUBECONFIG, or name a --kube-context of it") from None
    chosen = next((item for item in contexts if item["name"] == context), active)
    return connection, str((chosen.get("context") or {}).get("namespace") or "default")


def _pod(item: Mapping[str, Any], kind: JobKind) -> Pod:
    """Return what of a Pod's document a run is followed by."""
    metadata, status = item["metadata"], item.get("status") or {}
    statuses = status.get("containerStatuses") or []
    container: Mapping[str, Any] = next((entry for entry in statuses if entry.get("name") == CONTAINERS[kind]), {})
    state, before = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or before.get("terminated")
    return Pod(
        name=metadata["name"],
        uid=str(metadata.get("uid", "")),
        node=_number(metadata.get("labels") or {}),
        host=str((item.get("spec") or {}).get("nodeName") or ""),
        phase=str(status.get("phase", "Pending")),
        restarts=int(container.get("restartCount", 0)),
        has_begun=bool(state.get("running") or ended),
        is_leaving="deletionTimestamp" in metadata and metadata["deletionTimestamp"] is not None,
        waits_for=str(waiting.get("reason") or ""),
        message=str(waiting.get("message") or status.get("message") or ""),
        exit_status=None if ended is None else int(ended["exitCode"]),
    )


def _number(labels: Mapping[str, str]) -> int:
    """Return the number of a pod's node: the index of its Job, or of a PyTorchJob the master's, then the workers'."""
    if _INDEX in labels:
        return int(labels[_INDEX])
    is_worker = labels.get("training.kubeflow.org/replica-type", "").lower() == "worker"
    return int(labels.get("training.kubeflow.org/replica-index", 0)) + is_worker


def _is_owned(item: Mapping[str, Any], uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or [])


def _message(body: str) -> str:
    """Return the words of a Status, in one line; of what is none the text."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    text = document.get("message", "") if isinstance(document, dict) else body
    return " ".join(str(text).split())[:500]


def _text(body: Any) -> str:
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
