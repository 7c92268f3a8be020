"""Flags of a run on a cluster, checked as far as that goes here, and the job that they ask for. No torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from planner.emit.common import EmitOptions, device_resource, node_layout
from planner.emit.kubernetes import PLAN_VARIABLE, RUNTIME, ClusterJob, run_command
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from planner.types.plan_io import load_plan, plan_text
from planner.vocabulary import JobKind
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.launch.options import RequestedPlacement
from strategies.run_directory.request import named
from strategies.run_directory.spec import Placement

MOUNT = "/runs"
"""Where pods see the volume of run directories, unless `--kube-volume` says otherwise."""
_ENDING_SECONDS = 15
"""Between the end of the grace, by when ranks have saved, and the SIGKILL of the pod."""
_MOST_LETTERS = 48
"""Of a name, from which pods' names of at most 63 are made (`-node-0-0-xxxxx`)."""
_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_MOST_LETTERS - 2}}}[a-z0-9])?")
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
    detach: bool = False

    def refuse_elsewhere(self) -> None:
        """Refuse every one of them for a run that is not on a cluster.

        Raises:
            ContradictoryRequest: one is there.
        """
        given = [item.name for item in fields(self) if getattr(self, item.name)]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise ContradictoryRequest(f"{flag} is for --launcher kubernetes; name that, or leave it out")

    def refuse_but(self, *kept: str, why: str) -> None:
        """Refuse the others of them.

        Raises:
            ContradictoryRequest: one is there.
        """
        if others := [name for name in named(self) if name not in kept and getattr(self, name)]:
            raise ContradictoryRequest(f"--{others[0].replace('_', '-')} {why}; leave it out")


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
    nodes, per_node = _layout(_placed(placement, plan), processes, plan)
    if request.kube_image is None:
        raise DsplanError("--kube-image is missing; name an image that has the script, torch and dsplan")
    claim, mount = _volume(request.kube_volume)
    name = _name(request.kube_name, script)
    if request.kube_runtime is not None and request.kube_kind not in (None, "TrainJob"):
        raise ContradictoryRequest(f"--kube-runtime is a TrainJob's, and this is a {request.kube_kind}; leave it out")
    own_words = (*words, "--nproc", str(per_node)) if plan is None else tuple(words)
    return ClusterJob(
        name=name,
        kind=request.kube_kind or "TrainJob",
        image=request.kube_image,
        command=run_command(f"{mount}/{name}", nodes, (*own_words, "--", str(script), *arguments)),
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


def _placed(requested: RequestedPlacement, plan: Plan | None) -> int | None:
    """Return the number of nodes that was requested."""
    if others := named(requested).keys() - {"nodes", "launcher_option"}:
        flag = f"--{min(others).replace('_', '-')}"
        raise ContradictoryRequest(
            f"{flag} is for other launchers, and the pods of a job find each other; leave it out"
        )
    if requested.nodes is None:
        return None
    placement = RequestedPlacement(nodes=requested.nodes).over(Placement())
    if placement.is_elastic:
        raise ContradictoryRequest(f"--nodes {requested.nodes}: a job has a fixed number of pods; give one number")
    return placement.most_nodes


def _layout(nodes: int | None, processes: int | None, plan: Plan | None) -> tuple[int, int]:
    """Return nodes and ranks on each: the plan's, or those that were requested."""
    if plan is None:
        if processes is None:
            raise DsplanError("--nproc is missing: the processes of each pod, one per GPU; nothing here sees its nodes")
        return nodes or 1, processes
    planned = node_layout(plan)
    if (nodes or planned[0], processes or planned[1]) != planned:
        raise ContradictoryRequest(
            f"the plan is for {planned[0]} nodes of {planned[1]} processes; leave --nodes and --nproc out"
        )
    return planned


def _volume(text: str | None) -> tuple[str, str]:
    if text is None:
        raise DsplanError(
            "--kube-volume is missing; name the PersistentVolumeClaim that keeps run directories, which all nodes share"
        )
    match = _VOLUME.fullmatch(text)
    if match is None:
        raise DsplanError(f"--kube-volume {quote(text)} is read as CLAIM or CLAIM:/PATH, such as runs:{MOUNT}")
    return match[1], match[2] or MOUNT


def _name(text: str | None, script: Path) -> str:
    if text is None:
        stem = re.sub("[^a-z0-9]+", "-", script.stem.lower()).strip("-")[:24].strip("-")
        return f"dsplan-{stem or 'run'}-{time.strftime('%m%d-%H%M%S')}"
    if _NAME.fullmatch(text) is None:
        raise DsplanError(
            f"--kube-name {quote(text)} is no name of a job; use up to {_MOST_LETTERS} small letters, digits and -,"
            " a letter first"
        )
    return text


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
