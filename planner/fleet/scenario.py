"""Circumstances of a plan that a person wants to see, and the months in which they happen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from statistics import fmean

from hardware_db.records import dataclass
from hardware_db.units import DAY_SECONDS
from planner.cluster.budget import HOUR, NO_BUDGET
from planner.cost.failures import Outlook, outlook, save_seconds
from planner.errors import ContradictoryRequest
from planner.fleet.month import Fleet, Kind, Month, simulate
from planner.search.device_counts import on_devices
from planner.search.estimate import job_of
from planner.search.request import Request
from planner.search.search import first_plan
from planner.types.cluster import Cluster, Reliability
from planner.types.plan import Plan

SIZES = (8, 64, 512, 4_096, 16_384, 100_000)
"""GPUs of the clusters that are simulated beside the one asked for."""
_MONTHS_OF_A_SIZE = 5
EVENTS_OF_A_SIZE = 50_000
"""Events that the months of one number of nodes share; a choice: so many take under a second of a CPU's time, and the
failures of 20 months of 100,000 A100 at their published rate are 49,000."""
_LEAST_EVENTS = 500
"""Events that a month has where a person asks for many of them; a choice."""
DAYS, MONTHS = 30.0, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """Events beside failures, and how much of them is looked at; a field is named as its flag.

    Raises:
        ContradictoryRequest: something happens of which it is not said how long it lasts.
    """

    days: float = DAYS
    months: int = MONTHS
    seed: int = 0
    checkpoint_minutes: float | None = None
    """None: the best."""
    stragglers: float = 0.0
    """Nodes that become slow, of 1,000 in a day."""
    slowdown: float | None = None
    straggler_hours: float | None = None
    preemptions: float = 0.0
    """Of the job, in a day."""
    preempted_hours: float | None = None
    elastic: bool = False
    """Train on the nodes that are left where none is spare."""

    def __post_init__(self) -> None:
        for happens, flag, needs in (
            (self.stragglers, "--stragglers", ("slowdown", "straggler_hours")),
            (self.preemptions, "--preemptions", ("preempted_hours",)),
        ):
            missing = [f"--{name.replace('_', '-')}" for name in needs if getattr(self, name) is None]
            if happens and missing:
                raise ContradictoryRequest(f"{flag} {happens:g} needs {' and '.join(missing)} beside it")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Months of one number of nodes."""

    outlook: Outlook
    fleet: Fleet
    months: Sequence[Month]

    @property
    def goodput(self) -> float:
        """Mean over the months."""
        return fmean(month.goodput for month in self.months)

    @property
    def spread(self) -> tuple[float, float]:
        """Goodput of the worst and of the best month."""
        each = [month.goodput for month in self.months]
        return min(each), max(each)

    @property
    def failures(self) -> float:
        """Mean over the months."""
        return fmean(month.failures for month in self.months)

    @property
    def simulated_seconds(self) -> float:
        """Seconds of each month until so much had happened that the rest counts as alike, on average."""
        return fmean(month.simulated_seconds for month in self.months)

    @property
    def by_formula(self) -> float:
        """Goodput of failures alone, where a spare node is always free."""
        return self.outlook.goodput_every(self.fleet.interval_seconds)

    def hours(self, kind: Kind) -> float:
        """Return the hours of a month that went to something, on average."""
        return fmean(month.seconds[kind] for month in self.months) / HOUR


def scene(request: Request, plan: Plan, circumstances: Circumstances) -> Scene:
    """Return the months of a plan.

    Raises:
        ContradictoryRequest: no rate of failures is known, or spares are counted and nobody says how long repairs take.
    """
    ahead, stated = outlook(job_of(request, plan.configuration), plan.time.step_seconds), request.cluster.reliability
    if ahead is None:
        raise ContradictoryRequest(
            f"no failures of {request.cluster.device.name} are published; give --failures per 1,000 node-days"
        )
    if stated.spare_nodes is not None and stated.repair_hours is None:
        raise ContradictoryRequest(
            f"--spares {stated.spare_nodes} needs --repair-hours: after them a node is spare again"
        )
    if circumstances.elastic and stated.spare_nodes is None:
        raise ContradictoryRequest("--elastic needs --spares: without it a failed node is replaced at once")
    speed = _elastic(request, plan) if circumstances.elastic else None
    return _scene(ahead, stated, circumstances, speed, circumstances.months)


def at_sizes(seen: Scene, cluster: Cluster, circumstances: Circumstances) -> tuple[Scene, ...]:
    """Return months of the same job on other numbers of nodes, fewest first: the same steps and bytes of a checkpoint.

    Each node writes its part of it, and spares are as many for a node.
    """
    scenes, stated, gpus_per_node = [seen], cluster.reliability, cluster.gpus_per_node
    for gpus in SIZES:
        nodes = gpus // gpus_per_node
        if gpus % gpus_per_node or nodes in (0, seen.fleet.nodes):
            continue
        share = nodes / seen.fleet.nodes
        save = save_seconds(replace(cluster, nodes=nodes), seen.outlook.checkpoint_bytes)
        spares = None if stated.spare_nodes is None else math.ceil(stated.spare_nodes * share)
        ahead = replace(seen.outlook, nodes=nodes, save_seconds=save)
        months = min(circumstances.months, _MONTHS_OF_A_SIZE)
        other = replace(circumstances, elastic=False)
        scenes.append(_scene(ahead, replace(stated, spare_nodes=spares), other, None, months))
    return tuple(sorted(scenes, key=lambda each: each.fleet.nodes))


def _scene(
    ahead: Outlook, stated: Reliability, circumstances: Circumstances, speed: Callable[[int], float] | None, months: int
) -> Scene:
    fleet = _fleet(ahead, stated, circumstances, speed)
    seeds = range(circumstances.seed, circumstances.seed + months)
    most_events = max(_LEAST_EVENTS, EVENTS_OF_A_SIZE // months)
    each = [simulate(fleet, circumstances.days * DAY_SECONDS, seed, most_events) for seed in seeds]
    return Scene(outlook=ahead, fleet=fleet, months=each)


def _fleet(
    ahead: Outlook, stated: Reliability, circumstances: Circumstances, speed: Callable[[int], float] | None
) -> Fleet:
    per_node_second = 1 / (1000 * DAY_SECONDS)
    return Fleet(
        nodes=ahead.nodes,
        failures_per_node_second=ahead.per_1000_node_days * per_node_second,
        interval_seconds=ahead.interval_seconds
        if circumstances.checkpoint_minutes is None
        else 60 * circumstances.checkpoint_minutes,
        save_seconds=ahead.save_seconds,
        restart_seconds=ahead.restart_seconds,
        spares=stated.spare_nodes,
        repair_seconds=(stated.repair_hours or 0.0) * HOUR,
        stragglers_per_node_second=circumstances.stragglers * per_node_second,
        slowdown=circumstances.slowdown or 1.0,
        straggler_seconds=(circumstances.straggler_hours or 0.0) * HOUR,
        preemptions_per_second=circumstances.preemptions / DAY_SECONDS,
        preempted_seconds=(circumstances.preempted_hours or 0.0) * HOUR,
        speed=speed,
    )


_ROUND = (1, 4)
"""Numbers of nodes that are tried are multiples of these: few divisors make a poor plan, and idle nodes cost less."""


def _elastic(request: Request, plan: Plan) -> Callable[[int], float]:
    """Return the speed of the fastest plan on fewer nodes, as a share of the plan's own."""

    @cache
    def planned(nodes: int) -> float:
        fewer = on_devices(request, replace(request.cluster, nodes=nodes))
        with suppress(ContradictoryRequest):  # the batch cannot be split over so many
            other = first_plan(replace(fewer, objective="throughput", budget=NO_BUDGET))
            if other is not None:
                return other.throughput.samples_per_second / plan.throughput.samples_per_second
        return 0.0

    def speed(nodes: int) -> float:
        counts = {nodes - nodes % multiple for multiple in _ROUND} - {0}
        return min(1.0, max(map(planned, counts), default=0.0))

    return speed
