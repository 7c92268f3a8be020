"""Flags of a run on a cluster, checked as far as that goes here, and the job that they ask for. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from planner.emit.common import EmitOptions, device_resource
from planner.emit.kubernetes import RUNTIME, ClusterJob
from planner.emit.node_command import PLAN_VARIABLE, node_command
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from planner.types.plan_io import load_plan, plan_text
from planner.vocabulary import JobKind
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.launch.options import RequestedPlacement
from strategies.launch.submitted_runs import job_name, layout, requested_nodes

MOUNT = "/runs"
"""Where pods see the volume of run directories, unless `--kube-volume` says otherwise."""
_ENDING_SECONDS = 15
"""Between the end of the grace, by when ranks have saved, and the SIGKILL of the pod."""
_VOLUME = re.compile(r"([a-z0-9][-.a-z0-9]*)(?::(/[\w./-]*[\w-]))?")
_LIMIT = re.compile(r"([\w.-]+(?:/[\w.-]+)?)=(\d+(?:\.\d+)?(?:m|[kMGTP]i?|Ki)?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedJob:
    """The flags of a cluster; None is left open."""

    kube_image: str | None = None
    kube_volume: str | None = None
    """As it was written: CLAIM, or CLAIM:PATH."""
    kube_name: str | None = None
    kube_kind: JobKind | None = None
    kube_namespace: str | None = None
    kube_context: str | None = None
    kube_queue: str | None = None
    kube_runtime: str | None = None


def cluster_job(
    request: RequestedJob,
    placement: RequestedPlacement,
    words: Sequence[str],
    *,
    script: Path,
    arguments: Sequence[str],
    processes: int | None,
    plan_file: Path | None,
    grace_seconds: float | None,
) -> ClusterJob:
    """Return the job of `dsplan run WORDS SCRIPT ARGUMENTS`, whose words have no plan, processes and placement.

    Raises:
        DsplanError: something is missing, or contradicts itself.
    """
    plan = None if plan_file is None else load_plan(plan_file)
    nodes, per_node = layout(requested_nodes(placement, "pods"), processes, plan, "pod")
    if request.kube_image is None:
        raise DsplanError("--kube-image is missing; name an image that has the script, torch and dsplan")
    claim, mount = _volume(request.kube_volume)
    name = job_name(request.kube_name, "--kube-name", script)
    if request.kube_runtime is not None and request.kube_kind not in (None, "TrainJob"):
        raise ContradictoryRequest(f"--kube-runtime is a TrainJob's, and this is a {request.kube_kind}; leave it out")
    own_words = (*words, "--nproc", str(per_node)) if plan is None else tuple(words)
    return ClusterJob(
        name=name,
        kind=request.kube_kind or "TrainJob",
        image=request.kube_image,
        command=node_command(f"{mount}/{name}", nodes, (*own_words, "--", str(script), *arguments)),
        nodes=nodes,
        processes=per_node,
        limits=_limits(placement.launcher_option or (), per_node, plan),
        environment={} if plan is None else {PLAN_VARIABLE: plan_text(plan)},
        volume=claim,
        mount=mount,
        queue=request.kube_queue or "",
        runtime=request.kube_runtime or RUNTIME,
        stop_seconds=math.ceil(grace_seconds or GRACE_SECONDS) + _ENDING_SECONDS,
    )


def _volume(text: str | None) -> tuple[str, str]:
    if text is None:
        raise DsplanError(
            "--kube-volume is missing; name the PersistentVolumeClaim that keeps run directories, which all nodes share"
        )
    match = _VOLUME.fullmatch(text)
    if match is None:
        raise DsplanError(f"--kube-volume {quote(text)} is read as CLAIM or CLAIM:/PATH, such as runs:{MOUNT}")
    return match[1], match[2] or MOUNT


def _limits(options: Sequence[str], processes: int, plan: Plan | None) -> dict[str, int | str]:
    """Return the resources of a pod: those that are named, or else a GPU per rank, the plan's or NVIDIA's."""
    limits: dict[str, int | str] = {}
    for option in options:
        match = _LIMIT.fullmatch(option)
        if match is None:
            raise DsplanError(
                f"--launcher-option {quote(option)} is no resource of a pod; write one as nvidia.com/gpu=8"
            )
        limits[match[1]] = int(match[2]) if match[2].isdecimal() else match[2]
    if limits:
        return limits
    resource = "nvidia.com/gpu" if plan is None else device_resource(plan, EmitOptions())
    return {resource: processes} if resource else {}
