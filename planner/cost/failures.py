"""Failures of many nodes: how often a job is interrupted, how often to save for it, and what of its time is left.

A job of N nodes is a system in series: it fails N times as often as one of them, at random moments (arXiv 2410.21680
finds the mean time to failure to fall as 1/N). After a failure it is at the step of its last checkpoint, `restart`
seconds later.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hardware_db.datasheets import failure_record, recovery
from hardware_db.records import dataclass
from hardware_db.units import DAY_SECONDS, GB
from planner.cost.memory.units import mean_width
from planner.cost.precision import recipe_of
from planner.types.cluster import Cluster
from planner.types.job import Job

GPUS_OF_A_RECORD = 8
"""GPUs of the nodes that published rates are of."""


def young(save: float, mttf: float) -> float:
    """Return the seconds between checkpoints that lose least time where saving is short (Young 1974)."""
    return math.sqrt(2 * save * mttf)


def daly(save: float, mttf: float) -> float:
    """Return Daly's higher-order estimate of the same (Daly 2006, equation 37); `mttf` where saving takes 2 of it."""
    if save >= 2 * mttf:
        return mttf
    half = save / (2 * mttf)
    return young(save, mttf) * (1 + math.sqrt(half) / 3 + half / 9) - save


def best_interval(save: float, mttf: float) -> float:
    """Return the seconds of work between checkpoints with the largest goodput, exactly.

    The derivative of `goodput` vanishes where (1 - x) exp(x + d) = 1, with x and d the interval and the save in units
    of `mttf`: x = 1 + W(-exp(-1 - d)). Neither the restart nor the time until a checkpoint is durable matters for it.
    """
    if save <= 0:
        return 0.0
    shifted = save / mttf
    low, high = 0.0, 1.0
    for _ in range(50):  # each halves what is unknown of a number that stays below 1
        middle = (low + high) / 2
        # Logarithms: exp(d) overflows where saving takes far longer than nodes live.
        low, high = (middle, high) if math.log1p(-middle) + middle + shifted > 0 else (low, middle)
    return mttf * (low + high) / 2


def goodput(interval: float, *, save: float, restart: float, mttf: float, written: float = 0.0) -> float:
    """Return the share of the time that makes progress, between 0 and 1, with failures at random moments.

    Every `interval` seconds of work end with `save` seconds in which nothing is trained, and are safe `written` seconds
    after those; failures also hit restarts. A cycle from restart to failure lasts exp(restart/mttf) mttf in the mean
    and commits exp(-written/mttf) / (exp((interval + save)/mttf) - 1) intervals: Daly's complete model (2006, section
    2) where `written` is 0. An interval of 0 saves at every moment.
    """
    delayed = math.exp(-(restart + written) / mttf)
    if interval + save <= 0:
        return delayed
    exponent = (interval + save) / mttf
    return 0.0 if exponent > _NEVER else delayed * interval / mttf / math.expm1(exponent)


_NEVER = 500.0
"""Intervals of so many mean times to failure end without a failure once in 10^217."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Failures of a cluster, and what they make of a plan on it."""

    nodes: int
    per_1000_node_days: float
    """Failures of one node."""
    least_per_1000_node_days: float
    most_per_1000_node_days: float
    """Those that publications about such GPUs saw or imply; all alike where the person gave a rate."""
    said: str
    """Whose rate it is."""
    restart_seconds: float
    checkpoint_bytes: float
    save_seconds: float
    step_seconds: float

    @property
    def mttf_seconds(self) -> float:
        """Mean seconds between failures of the whole job; infinite where nodes do not fail."""
        return _mttf(self.nodes, self.per_1000_node_days)

    @property
    def interval_seconds(self) -> float:
        """Seconds of work between checkpoints: the best, in whole steps; infinite where nodes do not fail."""
        if math.isinf(self.mttf_seconds):
            return math.inf
        best = best_interval(self.save_seconds, self.mttf_seconds)
        return max(1, round(best / self.step_seconds)) * self.step_seconds

    @property
    def goodput(self) -> float:
        """Share of the plan's throughput that is left."""
        return self.goodput_at(self.per_1000_node_days)

    @property
    def goodput_range(self) -> tuple[float, float]:
        """Return the shares that are left at the most and at the least failures published."""
        return self.goodput_at(self.most_per_1000_node_days), self.goodput_at(self.least_per_1000_node_days)

    def goodput_at(self, per_1000_node_days: float) -> float:
        """Return what is left where nodes fail at another rate, and checkpoints come as often as is best for it."""
        other = replace(self, per_1000_node_days=per_1000_node_days)
        return 1.0 if math.isinf(other.mttf_seconds) else other.goodput_every(other.interval_seconds)

    def goodput_every(self, interval_seconds: float) -> float:
        """Return what is left with so many seconds of work between checkpoints."""
        if math.isinf(self.mttf_seconds):
            saved = interval_seconds > 0 and math.isfinite(interval_seconds)
            return interval_seconds / (interval_seconds + self.save_seconds) if saved else 1.0
        return goodput(interval_seconds, save=self.save_seconds, restart=self.restart_seconds, mttf=self.mttf_seconds)


def _mttf(nodes: int, per_1000_node_days: float) -> float:
    failures = nodes * per_1000_node_days / 1000 / DAY_SECONDS
    return 1 / failures if failures else math.inf


def outlook(job: Job, step_seconds: float) -> Outlook | None:
    """Return what failures make of a configuration, or None where neither the person nor a publication says how many.

    Saving counts as if training waited for all of it.
    """
    cluster = job.cluster
    rates = _rates(cluster)
    if rates is None:
        return None
    stated, published = cluster.reliability, recovery()
    minutes = published["restart_minutes"] if stated.restart_minutes is None else stated.restart_minutes
    size = checkpoint_bytes(job)
    (usual, least, most), publication = rates
    return Outlook(
        nodes=cluster.nodes,
        per_1000_node_days=usual,
        least_per_1000_node_days=least,
        most_per_1000_node_days=most,
        said=publication,
        restart_seconds=60 * minutes,
        checkpoint_bytes=size,
        save_seconds=save_seconds(cluster, size),
        step_seconds=step_seconds,
    )


def _rates(cluster: Cluster) -> tuple[tuple[float, float, float], str] | None:
    stated = cluster.reliability.failures_per_1000_node_days
    if stated is not None:
        return (stated, stated, stated), "the cluster file"
    record = failure_record(cluster.device.name)
    if record is None:
        return None
    share = cluster.gpus_per_node / GPUS_OF_A_RECORD
    return (share * record.per_1000_node_days, share * record.least, share * record.most), record.said


def save_seconds(cluster: Cluster, size: float) -> float:
    """Return what saving takes: as the person says, at this machine's measured disk, or at the published rate.

    Several nodes take a published time at least, however few the bytes: they wait for each other, for their directories
    and for the metadata.
    """
    stated, disk = cluster.reliability, cluster.rates.disk_write
    if stated.save_seconds is not None:
        return stated.save_seconds
    part = size / cluster.nodes
    if stated.checkpoint_gbs_per_node is None and disk is not None:
        writing = disk.seconds(part)
    else:
        writing = part / ((stated.checkpoint_gbs_per_node or recovery()["checkpoint_gbs_per_node"]) * GB)
    return max(writing, recovery()["least_save_seconds"]) if cluster.nodes > 1 else writing


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint of everything: weights as they are kept, master copies and moments of a kind.

    BLOOM's 176 B parameters at 2 + 4 + 8 bytes are 2.46e12, of which its log says 2.3 TB.
    """
    recipe = recipe_of(job)
    weights = mean_width(job, recipe) * job.counts.total
    return weights + (recipe.master + recipe.state) * job.counts.trained.total
