"""Flags of a managed job of SkyPilot, checked as far as that goes here, and the job that they ask for. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hardware_db.datasheets import find_node_type
from hardware_db.device import NodeType
from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.handed_in import quote
from planner.emit.clouds import ManagedJob, accelerators
from planner.emit.common import DEFAULTS, on_cpu
from planner.emit.node_command import PLAN_VARIABLE
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from planner.types.plan_io import load_plan, plan_text
from strategies.checkpoint.object_store import ObjectPath
from strategies.launch.grace_period import GRACE_SECONDS
from strategies.launch.options import RequestedPlacement
from strategies.launch.submitted_runs import job_name, layout, requested_nodes
from strategies.variables import RUN_ID

_ENDING_SECONDS = 15
"""Between the end of the grace, by when ranks have saved, and the end of the nodes."""
_OWN_KEYS = ("name", "num_nodes", "run")
"""Keys of a task that the flags decide."""
_MAPPINGS = ("resources", "config", "envs", "file_mounts", "volumes")
"""Keys of a task whose values are mappings, some of which are added to."""
_OPTION = re.compile(r"([a-z_]+)=(.+)")
_NODE_KEYS = ("accelerators", "instance_type", "any_of", "ordered")
"""Resources that say which nodes are meant."""
_CLOUDS = {"aws": "aws", "azure": "azure", "gcp": "gcp", "lambda": "lambda", "oracle": "oci", "runpod": "runpod"}
"""SkyPilot's names (`infra`) of the providers of our node types, whose first alias is the cloud's own name of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedTask:
    """The flags of a managed job; None is left open."""

    sky_name: str | None = None
    sky_task: Path | None = None
    sky_spot: bool = False


def requested_job(
    request: RequestedTask,
    placement: RequestedPlacement,
    words: Sequence[str],
    *,
    script: Path,
    arguments: Sequence[str],
    processes: int | None,
    plan_file: Path | None,
    checkpoint_directory: Path | None,
    grace_seconds: float | None,
) -> ManagedJob:
    """Return the job of `dsplan run WORDS SCRIPT ARGUMENTS`.

    The words have no plan, processes, placement and directory of checkpoints.

    Raises:
        DsplanError: something is missing, or contradicts itself.
    """
    plan = None if plan_file is None else load_plan(plan_file)
    nodes, per_node = layout(requested_nodes(placement, "nodes"), processes, plan, "node")
    name = job_name(request.sky_name, "--sky-name", script)
    task = {} if request.sky_task is None else _read_task(request.sky_task)
    resources = _resources(task.pop("resources", None) or {}, placement.launcher_option or (), plan, per_node)
    if request.sky_spot:
        resources["use_spot"] = True
    if not task.get("setup") and "image_id" not in resources:
        raise DsplanError(
            "nothing says how torch and dsplan come to the nodes; name an image that has them with --launcher-option"
            " image_id=docker:IMAGE, or a file with a `setup` with --sky-task"
        )
    task |= _work_directory(task, script)
    checkpoints = _checkpoints(checkpoint_directory, name, task)
    own_words = (*words, "--nproc", str(per_node)) if plan is None else tuple(words)
    return ManagedJob(
        name=name,
        nodes=nodes,
        words=(*own_words, "--checkpoint-dir", checkpoints, "--", str(script), *arguments),
        resources=resources,
        task=task,
        environment={RUN_ID: name, **({} if plan is None else {PLAN_VARIABLE: plan_text(plan)})},
        stop_seconds=math.ceil(grace_seconds or GRACE_SECONDS) + _ENDING_SECONDS,
    )


def price_of(plan_file: Path | None, nodes: int) -> str:
    """Return a sentence on what the nodes of a plan cost on demand; empty where no price is known."""
    plan = None if plan_file is None else load_plan(plan_file)
    node = None if plan is None else _node_type(plan)
    if node is None or node.usd_per_hour is None:
        return ""
    whole = nodes * node.usd_per_hour
    return f"{nodes} x {node.name} cost {whole:.2f} USD an hour on demand ({node.priced_on}); spot nodes cost less"


def _read_task(path: Path) -> dict[str, Any]:
    """Return a person's own part of the task.

    Raises:
        BrokenFile: it cannot be read, or is no task.
        ContradictoryRequest: it decides what the flags do.
    """
    try:
        task = yaml.safe_load(path.read_text())
    except OSError as problem:
        raise BrokenFile(path, f"cannot be read: {problem.strerror}", "name a task of SkyPilot") from None
    except (yaml.YAMLError, ValueError) as problem:
        where = str(problem).replace("\n", " ")
        raise BrokenFile(path, f"is not YAML: {where}", "name one task of SkyPilot") from None
    if not isinstance(task, dict):
        raise BrokenFile(path, "is no task of SkyPilot", "give it keys such as setup, resources, file_mounts")
    if own := [key for key in _OWN_KEYS if key in task]:
        remedy = "leave it out; --sky-name, --nodes and the script behind the flags say it"
        raise ContradictoryRequest(f"{path}: `{own[0]}` is set by dsplan run; {remedy}")
    for key in _MAPPINGS:
        if not isinstance(task.get(key) or {}, dict):
            raise BrokenFile(path, f"`{key}` is no mapping", "write it as SkyPilot's task has it")
    if not isinstance((task.get("config") or {}).get("hooks") or [], list):
        raise BrokenFile(path, "`config.hooks` is no list", "write it as SkyPilot's task has it")
    return task


def _resources(given: Mapping[str, Any], options: Sequence[str], plan: Plan | None, processes: int) -> dict[str, Any]:
    """Return the resources of a node: those that are named, else the plan's GPUs, its node type before others.

    Raises:
        DsplanError: none are named, or an option is no resource.
    """
    resources = dict(given)
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise DsplanError(
                f"--launcher-option {quote(option)} is no resource of SkyPilot; write one as accelerators=H100:8"
            )
        try:
            resources[match[1]] = yaml.safe_load(match[2])
        except yaml.YAMLError:
            raise DsplanError(
                f"--launcher-option {quote(option)}: the value is not YAML; write one as cpus=16+"
            ) from None
    if not isinstance(resources.get("job_recovery") or {}, (str, dict)):
        raise DsplanError("job_recovery is neither a strategy's name nor a mapping; write it as SkyPilot's task has it")
    if any(key in resources for key in _NODE_KEYS):
        return resources
    if plan is None:
        if "cpus" not in resources:
            raise DsplanError(
                "nothing says which nodes are meant; name their GPUs with --launcher-option accelerators=H100:8, or"
                " cpus=16+ for nodes without"
            )
        return resources
    if on_cpu(plan, DEFAULTS):
        return resources
    cards = accelerators(plan, processes)
    node = None if "infra" in resources else _node_type(plan)
    if node is None or node.gpus_per_node != processes:
        return {**resources, "accelerators": cards}
    first = {"infra": _CLOUDS[node.provider], "instance_type": node.aliases[0], "accelerators": cards}
    return {**resources, "ordered": [first, {"accelerators": cards}]}


def _node_type(plan: Plan) -> NodeType | None:
    """Return the node type of a plan, if it is one that SkyPilot can rent."""
    name = plan.cluster.get("node_type")
    node = find_node_type(name) if name else None
    return node if node is not None and node.provider in _CLOUDS and node.aliases else None


def _work_directory(task: Mapping[str, Any], script: Path) -> dict[str, Any]:
    """Return the task's `workdir`, from which the script is named; nothing where image or setup bring the script.

    Raises:
        DsplanError: the script is not in it.
    """
    own = task.get("workdir")
    if script.is_absolute() or isinstance(own, dict):  # a repository of git's
        return {}
    directory = (Path.cwd() if own is None else Path(str(own)).expanduser()).absolute()
    if (directory / script).is_file():
        return {"workdir": str(directory)}
    if own is None and task.get("setup"):
        return {}
    raise DsplanError(f"{script}: no such script in {directory}, which is sent to the nodes; name one that is there")


def _checkpoints(directory: Path | None, name: str, task: Mapping[str, Any]) -> str:
    """Return where the nodes save, which is there when they are not.

    Raises:
        DsplanError: it would go away with them.
    """
    outlive = "name a bucket, such as s3://BUCKET/PREFIX"
    if directory is None:
        raise DsplanError(f"--checkpoint-dir is missing, and new nodes have new disks; {outlive}")
    if isinstance(directory, ObjectPath):
        return f"{str(directory).rstrip('/')}/{name}"
    buckets = [path for path, source in (task.get("file_mounts") or {}).items() if isinstance(source, dict)]
    mounts = [*buckets, *(task.get("volumes") or {})]
    if not any(directory == Path(mount) or Path(mount) in directory.parents for mount in mounts):
        raise DsplanError(
            f"--checkpoint-dir {directory} would go away with a node; {outlive}, or a directory below a bucket of"
            " `file_mounts` or a volume of --sky-task"
        )
    return str(directory / name)
