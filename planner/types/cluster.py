"""Cluster: the devices, links and hosts a plan may use, and how fast they were measured to be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from hardware_db.device import Device, Link
from hardware_db.records import dataclass

if TYPE_CHECKING:
    from hardware_db.probe import Machine


# Measured seconds over the size of the work, which is what every micro-benchmark yields.


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points of (work, seconds), work ascending: FLOPs, bytes or parameters.

    Between two points seconds follow the straight line, a latency and a rate. Less work than the first point takes the
    first point's seconds, more than the last runs at the last point's rate; a point alone is a rate at every size.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, work: float) -> float:
        """Seconds that `work` takes."""
        points = self.points
        last_work, last_seconds = points[-1]
        if work >= last_work or len(points) == 1:
            return last_seconds * work / last_work
        above = bisect_left(points, (work, 0.0))
        if above == 0:
            return points[0][1]
        (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
        return low_seconds + (high_seconds - low_seconds) * (work - low) / (high - low)

    def rate(self, work: float) -> float:
        """Work per second at this size."""
        return work / self.seconds(work)


def constant_rate(rate: float) -> Curve:
    """Return a curve of one rate at every size, without latency."""
    return Curve(points=((1.0, 1.0 / rate),))


def curve_of(points: Iterable[tuple[float, float]]) -> Curve | None:
    """Return the curve through points in any order; the first of equal work counts, none at all make no curve.

    Less work takes no more time: where a point says otherwise something else ran beside it, and a later point counts.
    """
    by_work: dict[float, float] = {}
    for work, seconds in points:
        if work > 0 and seconds > 0:
            by_work.setdefault(work, seconds)
    least, points = math.inf, []
    for work, seconds in sorted(by_work.items(), reverse=True):
        least = min(least, seconds)
        points.append((work, least))
    return Curve(points=tuple(reversed(points))) if points else None


# Calibration factors: measured rates over those that the shipped model expects.


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Few, named, physical corrections of the time model; 1 is the shipped prior.

    Each multiplies a *rate*, so 0.9 means 10 % slower: weight products, fused attention, device memory, bus bandwidth
    inside a node and between nodes, host-device copies, the CPU optimizer, and the host's launching of kernels.
    """

    compute: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    intra_link: float = 1.0
    inter_link: float = 1.0
    host_link: float = 1.0
    cpu_optimizer: float = 1.0
    launch: float = 1.0

    def at(self, speed: float) -> Factors:
        """Return the factors of a device, and of its host, that compute at this share of the usual rate."""
        if speed == 1:
            return self
        slowed = ("compute", "attention", "memory", "cpu_optimizer", "launch")
        return replace(self, **{name: getattr(self, name) * speed for name in slowed})


SHIPPED = Factors()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Measured seconds of this machine, which replace datasheet figures where they are not None.

    Curves over the work of one kernel: `matmul`, and each of its backward's two products, over FLOPs in the compute
    dtype, `attention` and its backward over the forward's FLOPs of causal attention counted in full, `memory`,
    `clone` (a copy into memory just allocated), `elementwise` (a GELU) and `dropout` over bytes read and written,
    copies between host and device and disks over bytes, the CPU optimizers over parameters.
    `collectives` maps an operation and its number of ranks to a curve over the bytes of the whole tensor.
    `launch_seconds` is what the host takes to launch one kernel.
    """

    matmul: Curve | None = None
    matmul_backward: Curve | None = None
    attention: Curve | None = None
    attention_backward: Curve | None = None
    memory: Curve | None = None
    clone: Curve | None = None
    elementwise: Curve | None = None
    dropout: Curve | None = None
    launch_seconds: float | None = None
    host_to_device: Curve | None = None
    device_to_host: Curve | None = None
    collectives: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    cpu_optimizer: Curve | None = None
    cpu_optimizer_fused: Curve | None = None
    disk_read: Curve | None = None
    disk_write: Curve | None = None


NOTHING_MEASURED = Rates()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """Figures of failures that a person gives; what is None is as published (`planner/cost/failures.py`)."""

    failures_per_1000_node_days: float | None = None
    """Failures that end a job, of one node."""
    restart_minutes: float | None = None
    """From a failure to the first step after it."""
    checkpoint_gbs_per_node: float | None = None
    """1e9 bytes/s that a node writes of a checkpoint while all of them write."""
    save_seconds: float | None = None
    """Seconds that training waits for a checkpoint, in place of its bytes at that rate."""
    spare_nodes: int | None = None
    """Nodes beside those that train; None: a failed node is replaced at once."""
    repair_hours: float | None = None
    """Until a failed node is a spare one."""


PUBLISHED = Reliability()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`nodes` equal nodes of `gpus_per_node` devices.

    `capacity_bytes` is what one process may use on one device (free now, where the machine was probed). `assumed` is
    the sentence that says what was taken for granted, empty when everything was asked for or probed. `factors` is what
    calibration found, and `speed` the share of such devices' rate at which these compute. `groups` are the nodes as
    they are, in the order of their ranks, where they differ: the cluster itself is then what all of them can pass for
    (`planner.cluster.groups`). `machine` is the one that was probed, None for any other: what was measured on it is
    found by it.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    capacity_bytes: int
    intra_link: Link | None = None
    inter_link: Link | None = None
    nics_per_node: int = 1
    host_memory_bytes_per_node: int = 0
    host_cores_per_node: int = 0
    nvme_bytes_per_node: int = 0
    node_type: str = ""
    usd_per_gpu_hour: float | None = None
    assumed: str = ""
    probed: bool = False
    machine: Machine | None = field(default=None, compare=False)
    rates: Rates = NOTHING_MEASURED
    factors: Factors = SHIPPED
    reliability: Reliability = PUBLISHED
    speed: float = 1.0
    groups: tuple[Cluster, ...] = ()

    @property
    def gpus(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def is_mig_slice(self) -> bool:
        """True for a part of a GPU of this machine, which no other joins: collectives do not work between slices."""
        gpus = () if self.machine is None else self.machine.gpus
        return any(part.name == self.device.name for gpu in gpus for part in gpu.mig_devices)
