"""`dsplan run` and `dsplan watch` of a run on a Kubernetes cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hardware_db.notices import notice
from hardware_db.records import dataclass
from planner.vocabulary import JobKind

if TYPE_CHECKING:
    from strategies.launch.kubernetes.cluster import Cluster, Job
    from strategies.launch.kubernetes.request import RequestedJob
    from strategies.launch.options import RequestedPlacement
    from strategies.launch.report import Outcome

Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="Namespace of the cluster; by default the kubeconfig's.")
]
Context = Annotated[
    str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig; by default its present one.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesFlags:
    """The job of `--launcher kubernetes`, and its cluster."""

    kube_image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Image with the script, torch and dsplan; best by digest, NAME@sha256:DIGEST."
        ),
    ] = None
    kube_volume: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM[:PATH]", help="PersistentVolumeClaim of run directories, which pods see at PATH, or /runs."
        ),
    ] = None
    kube_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of the job and its run directory; by default the script's and the time."),
    ] = None
    kube_kind: Annotated[
        JobKind | None, typer.Option(help="Kubeflow's TrainJob (the default) or PyTorchJob, or a JobSet.")
    ] = None
    kube_namespace: Namespace = None
    kube_context: Context = None
    kube_queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kueue's LocalQueue that the job waits in.")
    ] = None
    kube_runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A TrainJob's ClusterTrainingRuntime, by default torch's; or TrainingRuntime/NAME of the namespace.",
        ),
    ] = None


def requested_job(flags: KubernetesFlags) -> RequestedJob:
    """Return the flags as what the launcher takes."""
    from strategies.launch.kubernetes.request import RequestedJob

    return RequestedJob(**{item.name: getattr(flags, item.name) for item in fields(RequestedJob)})


def run_on_cluster(
    script: Path | None,
    arguments: Sequence[str],
    planning: Any,
    placement: RequestedPlacement,
    supervision: Any,
    flags: KubernetesFlags,
    *,
    detach: bool,
    json: bool,
) -> int:
    """Submit or resume a run, follow it unless it is detached, and return the exit status."""
    from dsplan.cli.submitted import begins_anew, words_of
    from planner.emit.kubernetes import manifest
    from planner.errors import ContradictoryRequest
    from strategies.launch.kubernetes import submitted
    from strategies.launch.kubernetes.cluster import Cluster
    from strategies.launch.kubernetes.request import cluster_job
    from strategies.launch.submitted_runs import refuse_but

    requested = requested_job(flags)
    if planning.run_dir is not None:
        raise ContradictoryRequest("--run-dir: a run's directory is on --kube-volume, by its --kube-name; leave it out")
    if not begins_anew(script, planning, placement, supervision):
        why = "belongs to the job, which --resume takes from the cluster"
        refuse_but(requested, "kube_namespace", "kube_context", why=why)
        cluster = Cluster(flags.kube_context, flags.kube_namespace)
        job = submitted.resume(cluster, str(supervision.resume))
        notice(f"{job.kind} {job.name} in namespace {cluster.namespace} resumes")
        return _follow(cluster, job, flags, detach=detach, json=json)
    assert script is not None
    job_options = cluster_job(
        requested,
        placement,
        (*words_of(planning, ("plan", "nproc", "run_dir")), *words_of(supervision, ("resume", "resume_from"))),
        script=script,
        arguments=arguments,
        processes=planning.nproc,
        plan_file=planning.plan,
        grace_seconds=supervision.grace_seconds,
    )
    if "@sha256:" not in job_options.image:
        notice(f"{job_options.image} may be another image tomorrow; --kube-image NAME@sha256:DIGEST stays the same")
    cluster = Cluster(flags.kube_context, flags.kube_namespace)
    job = submitted.submit(cluster, manifest(job_options), job_options.volume)
    notice(f"{job.kind} {job.name} in namespace {cluster.namespace}: run directory {job_options.command[4]}")
    return _follow(cluster, job, flags, detach=detach, json=json)


def watch_on_cluster(name: str, namespace: str | None, context: str | None, *, once: bool, json: bool) -> int:
    """Show a run on a cluster as it is, and unless `once` follow it; the end of the following changes nothing."""
    from dsplan.cli.submitted import TAIL, watch
    from dsplan.render.show import show_json
    from strategies.launch.kubernetes.cluster import Cluster
    from strategies.launch.kubernetes.submitted import FollowedJob, find_job, job_to_dict, status_lines

    cluster = Cluster(context, namespace)
    job = find_job(cluster, name)
    if json:
        show_json(job_to_dict(job, cluster.pods(job), None))
    elif once:
        for line in status_lines(job, cluster.pods(job)):
            print(line)
    else:
        return watch(FollowedJob(cluster, job, None, tail=TAIL))
    return 0


def _follow(cluster: Cluster, job: Job, flags: KubernetesFlags, *, detach: bool, json: bool) -> int:
    from dsplan.cli.submitted import follow
    from strategies.launch.kubernetes.submitted import FollowedJob, job_to_dict

    def document(outcome: Outcome | None) -> dict[str, Any]:
        now = cluster.find(job.name, job.kind) or job
        return job_to_dict(now, cluster.pods(now), outcome)

    context = f" --kube-context {flags.kube_context}" if flags.kube_context else ""
    options = f"--launcher kubernetes --kube-namespace {cluster.namespace}{context}"
    run = partial(FollowedJob, cluster, job)
    return follow(job.name, options, run, document, detach=detach, json=json)
