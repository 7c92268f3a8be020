"""Jobs of a Kubernetes cluster as manifests: Kubeflow's TrainJob and PyTorchJob, and JobSet.

`dsplan emit --format kubernetes` writes one for people to fill in, `dsplan run --launcher kubernetes` submits one.

Sources of fields and variables: kubeflow/trainer v2.3 (`trainjob_types.go`, `docs/operator-guides/runtime-patches.md`;
`runtimePatches` is there since v2.2), whose torch runtime tells pods of nodes and ranks in `PET_` variables;
kubernetes-sigs/jobset v1alpha2 (`jobset_types.go`; a pod is reached as JOBSET-node-0-RANK.JOBSET);
kubeflow/training-operator v1.9 (`pytorchjob_types.go`, `envvar.go`); kubernetes-sigs/kueue (the queue's label).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import yaml

from hardware_db.records import dataclass
from planner.emit.common import DEFAULTS, EmitOptions, as_comment, device_resource, node_layout, script_duties
from planner.emit.node_command import NODE_ADDRESS, NODE_PORT, NODE_RANK, PORT, REFUSED, SAVED
from planner.types.plan import Plan
from planner.vocabulary import JobKind

API_VERSIONS: dict[JobKind, str] = {
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
}
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label of the LocalQueue in which a job waits for its quota."""
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime of torch that Kubeflow's trainer installs."""
CONTAINERS: dict[JobKind, str] = {"TrainJob": "node", "PyTorchJob": "pytorch", "JobSet": "node"}
"""The container that trains: the torch runtime's, the one that PyTorchJob's controller requires, and ours."""

_VOLUME = "runs"
_RESTARTS = 6
"""Pods that may fail before a job does: the Job's own `backoffLimit` where nobody sets it (batch/v1)."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A training job of a cluster: the same container on every node."""

    name: str
    """Of the job and its run directory, a DNS label."""
    kind: JobKind = "TrainJob"
    image: str
    command: tuple[str, ...]
    """Of the container; Kubernetes' references `$(NAME)` are not meant in it."""
    nodes: int = 1
    processes: int
    """Ranks on each node."""
    limits: Mapping[str, int | str] = field(default_factory=dict)
    """Resources of a node, as `nvidia.com/gpu: 8`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the container; none of them is a secret."""
    volume: str = ""
    """The PersistentVolumeClaim of the run directory; empty: none."""
    mount: str = ""
    """Where the container sees it."""
    queue: str = ""
    """Kueue's LocalQueue; empty: none."""
    runtime: str = RUNTIME
    """A TrainJob's ClusterTrainingRuntime, or `TrainingRuntime/NAME` for one of the namespace."""
    stop_seconds: int | None = None
    """Time between SIGTERM and SIGKILL; None leaves it to the cluster."""


def manifest(job: ClusterJob) -> dict[str, Any]:
    """Return the job as the document that the cluster's API takes."""
    spec = {"TrainJob": _train_job, "PyTorchJob": _pytorch_job, "JobSet": _job_set}[job.kind](job)
    labels = {"labels": {QUEUE_LABEL: job.queue}} if job.queue else {}
    return {
        "apiVersion": API_VERSIONS[job.kind],
        "kind": job.kind,
        "metadata": {"name": job.name, **labels},
        "spec": spec,
    }


def _train_job(job: ClusterJob) -> dict[str, Any]:
    kind, _, name = job.runtime.rpartition("/")
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": _literal(job.command),
        **_variables(job.environment),
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        **({"resourcesPerNode": {"limits": dict(job.limits)}} if job.limits else {}),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": name, **({"kind": kind} if kind else {})}, "trainer": trainer}
    if patch := _pod(job, {"name": CONTAINERS["TrainJob"], **_mounts(job)}):
        node = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
        runtime = {"template": {"spec": {"replicatedJobs": [node]}}}
        spec["runtimePatches"] = [{"manager": "dsplan", "trainingRuntimeSpec": runtime}]
    return spec


def _pytorch_job(job: ClusterJob) -> dict[str, Any]:
    pod = {"automountServiceAccountToken": False, **_pod(job, _container(job, job.environment))}
    replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    return {
        "nprocPerNode": str(job.processes),
        "runPolicy": {"backoffLimit": _RESTARTS, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": replicas,
    }


def _job_set(job: ClusterJob) -> dict[str, Any]:
    address = {NODE_ADDRESS: f"{job.name}-node-0-0.{job.name}", NODE_PORT: str(PORT)}
    container = _container(job, {**job.environment, **address})
    index = {"name": NODE_RANK, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    container["env"].append(index)
    pod = {"restartPolicy": "Never", "automountServiceAccountToken": False, **_pod(job, container)}
    # Pods that saved or that the cluster moves are no failures; what no repetition mends is not repeated.
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [SAVED]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [REFUSED]}},
    ]
    batch = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": _RESTARTS,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    return {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": batch}}]}


def _container(job: ClusterJob, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": CONTAINERS[job.kind],
        "image": job.image,
        "command": _literal(job.command),
        **_variables(environment),
        **({"resources": {"limits": dict(job.limits)}} if job.limits else {}),
        **_mounts(job),
    }


def _pod(job: ClusterJob, container: dict[str, Any]) -> dict[str, Any]:
    """Return what a pod has beside its restart policy; a container of a name alone changes nothing and is left out."""
    stop = {} if job.stop_seconds is None else {"terminationGracePeriodSeconds": job.stop_seconds}
    claim = {"name": _VOLUME, "persistentVolumeClaim": {"claimName": job.volume}}
    return {
        **stop,
        **({"volumes": [claim]} if job.volume else {}),
        **({"containers": [container]} if len(container) > 1 else {}),
    }


def _mounts(job: ClusterJob) -> dict[str, Any]:
    return {"volumeMounts": [{"name": _VOLUME, "mountPath": job.mount}]} if job.volume else {}


def _variables(environment: Mapping[str, str]) -> dict[str, Any]:
    values = zip(environment, _literal(tuple(environment.values())), strict=True)
    return {"env": [{"name": name, "value": value} for name, value in values]} if environment else {}


def _literal(texts: tuple[str, ...]) -> list[str]:
    """Return texts that Kubernetes makes the given ones of: in them `$(NAME)` is a reference, and `$$` one `$`."""
    return [re.sub(r"\$\$+|\$(?=\()", lambda dollars: 2 * dollars[0], text) for text in texts]


# A plan as a file for `kubectl`.


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`trainjob.yaml`: `kubectl apply -f trainjob.yaml`, once the image and the script are named in it.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    resource = device_resource(plan, options)
    job = ClusterJob(
        name=f"dsplan-{plan.configuration.strategy}",
        image="IMAGE",
        command=("torchrun", "train.py"),
        nodes=nodes,
        processes=per_node,
        limits={resource: per_node} if resource else {},
    )
    duties = as_comment(script_duties(plan, "kubernetes", options))
    head = f"# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: kubectl apply -f trainjob.yaml\n"
    yours = "# Name an image that has the script, torch and dsplan, and the script with its arguments.\n"
    return {"trainjob.yaml": f"{head}{duties}{yours}{yaml.safe_dump(manifest(job), sort_keys=False)}"}
