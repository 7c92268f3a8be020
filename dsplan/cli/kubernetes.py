"""`dsplan run` and `dsplan watch` of a run on a Kubernetes cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from hardware_db.notices import notice
from hardware_db.records import dataclass
from planner.vocabulary import JobKind

if TYPE_CHECKING:
    from strategies.launch.kubernetes.cluster import Cluster, Job
    from strategies.launch.kubernetes.request import RequestedJob
    from strategies.launch.kubernetes.submitted import FollowedJob
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
    detach: Annotated[bool, typer.Option("--detach", help="Submit the job, and do not follow it.")] = False


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
    json: bool,
) -> int:
    """Submit or resume a run, follow it unless it is detached, and return the exit status."""
    from planner.emit.kubernetes import manifest
    from planner.errors import ContradictoryRequest
    from strategies.launch.kubernetes import submitted
    from strategies.launch.kubernetes.cluster import Cluster
    from strategies.launch.kubernetes.request import cluster_job

    requested = requested_job(flags)
    if planning.run_dir is not None:
        raise ContradictoryRequest("--run-dir: a run's directory is on --kube-volume, by its --kube-name; leave it out")
    if supervision.resume is not None:
        _check_resumption(script, planning, placement, supervision)
        why = "belongs to the job, which --resume takes from the cluster"
        requested.refuse_but("kube_namespace", "kube_context", "detach", why=why)
        cluster = Cluster(flags.kube_context, flags.kube_namespace)
        job = submitted.resume(cluster, str(supervision.resume))
        notice(f"{job.kind} {job.name} in namespace {cluster.namespace} resumes")
        return _follow(cluster, job, flags, json=json)
    if script is None:
        raise ContradictoryRequest("SCRIPT is missing; name it as it is in the image, or --resume a run by its name")
    if supervision.resume_from is not None:
        raise ContradictoryRequest("--resume-from says from where --resume resumes a run here; leave it out")
    job_options = cluster_job(
        requested,
        placement,
        (*_words(planning, ("plan", "nproc", "run_dir")), *_words(supervision, ("resume", "resume_from"))),
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
    return _follow(cluster, job, flags, json=json)


def watch_on_cluster(name: str, namespace: str | None, context: str | None, *, once: bool, json: bool) -> int:
    """Show a run on a cluster as it is, and unless `once` follow it; the end of the following changes nothing."""
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
        followed = FollowedJob(cluster, job, None, tail=_TAIL)
        with suppress(KeyboardInterrupt):
            _print(followed, sys.stdout)
        return 0 if followed.outcome is None else followed.outcome.exit_code
    return 0


_TAIL = 40
"""Lines of a log that `watch` begins with."""


def _check_resumption(script: Path | None, planning: Any, placement: RequestedPlacement, supervision: Any) -> None:
    """Refuse what the pods would not hear of: they resume what their directories hold."""
    from planner.errors import ContradictoryRequest
    from strategies.checkpoint.object_store import ObjectPath
    from strategies.run_directory.request import named

    if isinstance(supervision.resume, ObjectPath):
        raise ContradictoryRequest(f"--resume {supervision.resume}: on a cluster a run is resumed by its job's name")
    others = [*_words(planning, ()), *_words(supervision, ("resume",))]
    others += [f"--{name.replace('_', '-')}" for name in named(placement) if name != "launcher"]
    if script is not None or others:
        what = str(script) if script is not None else others[0]
        raise ContradictoryRequest(f"{what}: on a cluster --resume resumes the run as it is, by its name alone")


def _follow(cluster: Cluster, job: Job, flags: KubernetesFlags, *, json: bool) -> int:
    """Follow a job to its end, print the last words, and return the exit status."""
    from dsplan.render.show import show_json
    from strategies.launch.grace_period import StopRequests
    from strategies.launch.kubernetes.submitted import FollowedJob, job_to_dict

    options = f"--launcher kubernetes{_location(cluster, flags)}"
    outcome: Outcome | None = None
    if flags.detach:
        notice(f"watch it from anywhere: dsplan watch {job.name} {options}")
    else:
        with StopRequests() as requests:
            followed = FollowedJob(cluster, job, requests)
            _print(followed, sys.stderr if json else sys.stdout)
            outcome = followed.outcome
    if json:
        now = cluster.find(job.name, job.kind) or job
        show_json(job_to_dict(now, cluster.pods(now), outcome))
    if outcome is None:
        return 0
    if outcome.reason:
        notice(outcome.reason)
    elif outcome.name != "completed":
        notice(f"resume it from anywhere: dsplan run {options} --resume {job.name}")
    return outcome.exit_code


def _location(cluster: Cluster, flags: KubernetesFlags) -> str:
    context = f" --kube-context {flags.kube_context}" if flags.kube_context else ""
    return f" --kube-namespace {cluster.namespace}{context}"


def _print(followed: FollowedJob, out: TextIO) -> None:
    from hardware_db.notices import printable

    for line in followed.lines():
        print(printable(line), file=out, flush=True)


def _words(flags: Any, left_out: tuple[str, ...]) -> list[str]:
    """Return a group of flags as they are written on a command line, without those that are left open."""
    words: list[str] = []
    for item in fields(flags):
        value, flag = getattr(flags, item.name), f"--{item.name.replace('_', '-')}"
        if item.name in left_out or value is None or value == item.default:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no{flag[1:]}")
        else:
            words += [flag, str(value)]
    return words
