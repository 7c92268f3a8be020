"""Tasks of SkyPilot and dstack, which look for the cheapest nodes of many clouds.

`dsplan emit --format skypilot` and `--format dstack` write one for people to fill in, `dsplan run --launcher skypilot`
submits one as a managed job, which SkyPilot starts again elsewhere where its nodes go away.

Sources of fields and variables: SkyPilot's "Task YAML" and "Distributed multi-node jobs" pages, and of its release
0.14.1 `sky/utils/schemas.py` (hooks, job_recovery), `sky/core.py` (hooks run on the head before nodes are taken down),
`sky/skylet/skylet.py` (on Kubernetes at a pod's SIGTERM too) and `sky/jobs/controller.py` (exit statuses that are
recovered from); dstack's "task" reference and "Distributed tasks".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from hardware_db.records import dataclass
from planner.emit.common import DEFAULTS, EmitOptions, as_comment, node_layout, on_cpu, script_duties
from planner.emit.launchers import launch_command
from planner.emit.node_command import NODE_ADDRESS, NODE_RANK, SAVED, node_command, save_command
from planner.types.plan import Plan

_HEAD = 'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'

# Managed jobs that run `dsplan run`.


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedJob:
    """A managed job of SkyPilot: the same command on every node."""

    name: str
    """Of the job; the run is resumed by it."""
    nodes: int = 1
    words: tuple[str, ...]
    """Of `dsplan run` on a node, as `node_command` takes them."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """SkyPilot's `resources` of a node."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What else the task has: `setup`, `workdir`, `file_mounts`, `secrets`; nothing that is set here."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the nodes; none of them is a secret."""
    stop_seconds: int
    """Time that a run may take to save before its nodes are taken down."""


def managed_job(job: ManagedJob) -> dict[str, Any]:
    """Return the job as the document of a SkyPilot task."""
    resources, config = dict(job.resources), dict(job.task.get("config") or {})
    recovery = resources.get("job_recovery") or {}
    recovery = {"strategy": recovery} if isinstance(recovery, str) else dict(recovery)
    codes = recovery.get("recover_on_exit_codes", [])
    codes = [codes] if isinstance(codes, int) else list(codes)
    recovery["recover_on_exit_codes"] = [*codes, *([] if SAVED in codes else [SAVED])]
    hook = {"events": ["down", "preemption"], "timeout": job.stop_seconds, "run": save_command(_process_file(job))}
    config["hooks"] = [*(config.get("hooks") or []), hook]
    return {
        **job.task,
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {**resources, "job_recovery": recovery},
        "envs": {**(job.task.get("envs") or {}), **job.environment},
        "config": config,
        "run": _run(job),
    }


def _process_file(job: ManagedJob) -> str:
    return f"~/.dsplan-{job.name}.pid"


def _run(job: ManagedJob) -> str:
    # The directory is expanded by the shell: nodes have homes of their own.
    directory = f"~/dsplan-runs/{job.name}"
    shell, flag, script, own_name, _, *words = node_command(directory, job.nodes, job.words)
    start = shlex.join((shell, flag, script, own_name))
    return f"""\
export {NODE_RANK}="$SKYPILOT_NODE_RANK"
export {NODE_ADDRESS}="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"
echo $$ > {_process_file(job)}
exec {start} {directory} {shlex.join(words)}
"""


# Tasks for people to fill in.


def skypilot(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`task.yaml`: `sky jobs launch task.yaml`, which also starts it again elsewhere where its nodes go away.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    gpus = "" if on_cpu(plan, options) else f"  accelerators: {accelerators(plan, per_node)}\n"
    head = _task_head(plan, "skypilot", options, "sky jobs launch task.yaml", "a bucket in file_mounts")
    text = f"""{head}name: dsplan
workdir: .
num_nodes: {nodes}
{_optional("resources", gpus)}envs:
  SCRIPT: train.py
setup: |
  pip install torch
run: |
{_on_nodes(nodes, _HEAD, "$SKYPILOT_TASK_ID", indent=2)}  {launch_command(plan)} $SCRIPT
"""
    return {"task.yaml": text}


def dstack(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`train.dstack.yml`: `dstack apply -f train.dstack.yml`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    gpus = "" if on_cpu(plan, options) else f"  gpu: {_card(plan, joint=':', few=False)}:{per_node}\n"
    address = "MASTER_ADDR=$DSTACK_MASTER_NODE_IP"
    head = _task_head(plan, "dstack", options, "dstack apply -f train.dstack.yml", "a volume")
    text = f"""{head}type: task
name: dsplan
nodes: {nodes}
env:
  - SCRIPT=train.py
commands:
  - pip install torch
  - |
{_on_nodes(nodes, address, "$DSTACK_RUN_NAME", indent=4)}    {launch_command(plan)} $SCRIPT
{_optional("resources", gpus)}retry:
  on_events: [no-capacity, interruption]
  duration: 1d
"""
    return {"train.dstack.yml": text}


def accelerators(plan: Plan, number: int) -> str:
    """Return so many of a plan's GPUs as SkyPilot names them."""
    return f"{_card(plan, joint='-', few=True)}:{number}"


def _task_head(plan: Plan, format: str, options: EmitOptions, call: str, store: str) -> str:
    first = f"# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: {call}\n"
    yours = f"# Name the script and its arguments in SCRIPT, install what it needs, and give its checkpoints {store}.\n"
    return f"{first}{as_comment(script_duties(plan, format, options))}{yours}"


def _optional(key: str, lines: str) -> str:
    return f"{key}:\n{lines}" if lines else ""


def _on_nodes(nodes: int, address: str, run: str, *, indent: int) -> str:
    """Return the lines of a task that name the meeting of its nodes to torchrun; none on one node."""
    lines = [address, f"RDZV_ID={run}", "export MASTER_ADDR RDZV_ID"] if nodes > 1 else []
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def _card(plan: Plan, *, joint: str, few: bool) -> str:
    """Return a GPU as clouds call it, its memory behind a `joint` where there is any; `few` say it in their names.

    SkyPilot's A100 and V100 without a size are those of 40 and 16 GB (`sky show-gpus`); its others have one size.
    """
    name = str(plan.cluster.get("device", ""))
    memory = re.search(r"[0-9]+GB", name)
    words = [word for word in name.split("-") if not re.fullmatch(r"(SXM|PCIE|NVL)[0-9]*|[0-9]+GB|GCD", word)]
    card = "".join(words[:2]) + "".join(f"-{word}" for word in words[2:])
    is_said = memory is not None and (not few or (card, memory[0]) in (("A100", "80GB"), ("V100", "32GB")))
    return f"{card}{joint}{memory[0]}" if memory is not None and is_said else card
