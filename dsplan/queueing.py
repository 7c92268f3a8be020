"""The plan that ends first: how long each number of devices trains, and when a SLURM queue would give them.

SLURM answers `sbatch --test-only`, which submits nothing: when its scheduler would start such a job, of the jobs and
the limits that it knows of now (sbatch(1), `--test-only`).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from planner.cluster.budget import HOUR, bill_of
from planner.emit.common import node_layout
from planner.errors import ContradictoryRequest
from planner.search.device_counts import on_fewer_devices
from planner.search.request import Request
from planner.search.search import first_plan
from planner.types.plan import Plan

_ANSWER_SECONDS = 60.0
_MOST_MINUTES = 100 * 365 * 24 * 60
"""A century: a choice, well below what SLURM and calendars count to."""
_START = re.compile(
    r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?: using \d+ processors)?(?: on nodes \S+)?(?: in partition (\S+))?"
)
_REFUSAL = re.compile(r"(?:allocation failure|sbatch: error(?!: Batch job)|Batch job submission failed): (.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The fastest plan on a number of devices, how long it trains, and when the queue has room for it.

    `limit_minutes` is the time that it asks SLURM for: the slower end of where nine runs of ten lie, in whole minutes.
    Without `starts` the queue refuses such a job, as `refusal` says.
    """

    plan: Plan
    train_seconds: float
    limit_minutes: int
    starts: datetime | None = None
    partition: str = ""
    refusal: str = ""

    @property
    def ends(self) -> datetime | None:
        """The moment at which training ends, in the time of this machine."""
        return None if self.starts is None else self.starts + timedelta(seconds=self.train_seconds)

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices together."""
        return self.train_seconds / HOUR * self.plan.configuration.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Queue:
    """The state of a queue: jobs that wait, nodes, and those of them that are idle."""

    waiting: int
    nodes: int
    idle: int


def look(request: Request, options: Sequence[str]) -> tuple[Queue, list[Turn]]:
    """Return the queue, and the plans on all devices, half, and so on, by when they would end, refused ones last.

    `options` are handed to sbatch as they are, such as `--partition=a100`.

    Raises:
        DsplanError: the tokens of the training were not given, or SLURM is not here or does not answer.
        ContradictoryRequest: the global batch cannot be split over the devices in any way.
    """
    if request.budget.tokens is None:
        raise DsplanError("how long a plan trains follows from the tokens of the whole training; give --tokens")
    queue = _queue()
    turns = [_in_queue(turn, request, options) for turn in _trained(request)]
    return queue, sorted(turns, key=lambda turn: (turn.ends or datetime.max, turn.gpu_hours))


def _trained(request: Request) -> Iterator[Turn]:
    """Yield the fastest plan on each number of devices on which one fits, and how long it trains."""
    for option in (request, *on_fewer_devices(request)):
        try:
            plan = first_plan(replace(option, objective="throughput"))
        except ContradictoryRequest:
            if option is request:
                raise
            continue
        if plan is None:
            continue
        days = bill_of(plan.configuration, plan.time.step_seconds, None, request.budget).days
        assert days is not None
        seconds = days * 24 * HOUR
        slower = (plan.time.step_seconds_high or plan.time.step_seconds) / plan.time.step_seconds
        yield Turn(plan=plan, train_seconds=seconds, limit_minutes=math.ceil(seconds * slower / 60))


def _in_queue(turn: Turn, request: Request, options: Sequence[str]) -> Turn:
    """Return the turn with what the queue says of it."""
    if turn.limit_minutes > _MOST_MINUTES:
        return replace(turn, refusal="it would train for more than a century")
    nodes, per_node = node_layout(turn.plan)
    words = [f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--time={turn.limit_minutes}"]
    if not request.cluster.device.is_cpu:
        words.append(f"--gpus-per-node={per_node}")
    if per_node == request.cluster.gpus_per_node:
        words.append("--exclusive")  # as the emitted slurm.sh
    reply = _ask("sbatch", "--test-only", "--job-name=dsplan", *words, *options, "--wrap=true")
    answer = reply.stdout + reply.stderr
    if (start := _START.search(answer)) is not None:
        starts = datetime.fromisoformat(start[1])
        return replace(turn, starts=max(starts, datetime.now()), partition=start[2] or "")
    refusals = _REFUSAL.findall(answer)
    if not refusals:
        raise DsplanError(f"sbatch --test-only says neither when a job would start nor why not: {answer.strip()[:200]}")
    return replace(turn, refusal=refusals[0].strip())


def _queue() -> Queue:
    """Return the state of the queue, by `squeue` and `sinfo`."""
    waiting = _ask("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i").stdout.split()
    lines = _ask("sinfo", "--noheader", "--Node", "--format=%N %t").stdout.splitlines()
    nodes = dict(words for line in lines if len(words := line.split()) == 2)
    idle = sum(state.rstrip(_MARKS) == "idle" for state in nodes.values())
    return Queue(waiting=len(waiting), nodes=len(nodes), idle=idle)


_MARKS = "*~#!%$@+-^"
"""Signs behind a node's state (sinfo(1), NODE STATE CODES)."""
_UNREACHED = ("Unable to contact slurm controller", "failed to fetch config", "Could not establish a configuration")


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM that changes nothing."""
    environment = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_ANSWER_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise DsplanError(f"{command[0]} did not answer within {_ANSWER_SECONDS:g} seconds; is slurmctld up?") from None
    except OSError as problem:
        raise DsplanError(f"{command[0]} cannot be run ({problem.strerror}); use a login node of SLURM") from None
    if any(words in answer.stderr for words in _UNREACHED):
        raise DsplanError(
            f"{command[0]} does not reach SLURM's controller; use a login node, where `scontrol ping` does"
        )
    if answer.returncode and command[0] != "sbatch":
        raise DsplanError(f"{command[0]}: {(answer.stderr.strip().splitlines() or ['failed'])[-1]}")
    return answer
