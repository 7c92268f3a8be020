"""Communication of data-parallel strategies in one step, and how much of it stays visible."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hardware_db.units import MIB
from planner.cluster import Cluster
from planner.job import Job
from planner.timing.communication import collective_seconds
from planner.timing.compute import Passes
from planner.timing.implementation import Implementation
from planner.timing.layout import Layout
from planner.timing.overlap import exposed_seconds

DDP_BUCKET_BYTES = 25 * MIB
"""torch.nn.parallel.DistributedDataParallel's default `bucket_cap_mb`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Seconds spent communicating in one step, and those that no compute hides."""

    total: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Communication) -> Communication:
        return Communication(total=self.total + other.total, exposed=self.exposed + other.exposed)

    def __mul__(self, factor: float) -> Communication:
        return Communication(total=self.total * factor, exposed=self.exposed * factor)


def data_parallel(job: Job, where: Layout, passes: Passes, code: Implementation) -> Communication:
    """Communication of the whole step, given the compute of one micro-batch on one rank."""
    if not code.hides_reductions:
        passes = replace(passes, backward=0.0, recomputed=0.0)
    strategy = job.configuration.strategy
    if strategy == "zero1" or strategy == "zero2":
        return _sharded_optimizer(job, where, passes)
    if where.shards > 1 or where.replica_group.size > 1:
        sharded = strategy not in ("ddp", "single")
        return _sharded_parameters(job, where, passes) if sharded else _all_reduced(job.cluster, where, passes)
    return Communication()


def _all_reduced(cluster: Cluster, where: Layout, passes: Passes) -> Communication:
    """DDP: gradients all-reduced once per step in buckets, behind the last micro-batch's backward."""
    size = where.parameters * where.reduce_bytes
    buckets = max(1.0, size / DDP_BUCKET_BYTES)
    bucket = collective_seconds(cluster, "all_reduce", size / buckets, where.replica_group)
    total = buckets * bucket
    return Communication(total=total, exposed=exposed_seconds(passes.backward + passes.recomputed, total, bucket))


def _sharded_optimizer(job: Job, where: Layout, passes: Passes) -> Communication:
    """ZeRO-1 reduces once per step, ZeRO-2 every micro-batch; updated parameters are gathered at the end, unhidden."""
    size = where.parameters * where.reduce_bytes
    reduced = collective_seconds(job.cluster, "reduce_scatter", size, where.shard_group)
    reduced += collective_seconds(job.cluster, "all_reduce", size / where.shards, where.replica_group)
    hidden_behind = passes.backward + passes.recomputed
    once = Communication(total=reduced, exposed=exposed_seconds(hidden_behind, reduced))
    rounds = job.configuration.gradient_accumulation_steps if job.configuration.zero_stage == 2 else 1
    gathered = collective_seconds(job.cluster, "all_gather", where.parameters * where.gather_bytes, where.shard_group)
    return once * rounds + Communication(total=gathered, exposed=gathered)


def _sharded_parameters(job: Job, where: Layout, passes: Passes) -> Communication:
    """FSDP and ZeRO-3: blocks gathered before forward and again before backward, one ahead of compute.

    ZeRO-3 reduces in every micro-batch, FSDP too unless the plan accumulates without synchronisation. FSDP gathers once
    where parameters stay whole between forward and backward.
    """
    cluster, steps = job.cluster, job.configuration.gradient_accumulation_steps
    block = collective_seconds(cluster, "all_gather", where.block * where.gather_bytes, where.shard_group)
    root = collective_seconds(cluster, "all_gather", where.root * where.gather_bytes, where.shard_group)
    forward_total = where.layers * block + root
    forward = Communication(total=forward_total, exposed=exposed_seconds(passes.forward, forward_total, root + block))
    again = 0.0 if job.configuration.strategy == "fsdp-grad-op" else where.layers * block
    reduced_block, reduced_root = _reduced(cluster, where, where.block), _reduced(cluster, where, where.root)
    reduced = where.layers * reduced_block + reduced_root
    behind = passes.backward + passes.recomputed
    quiet = Communication(total=again, exposed=exposed_seconds(behind, again, min(block, again)))
    loud = Communication(
        total=again + reduced,
        exposed=exposed_seconds(behind, again + reduced, min(block, again) + reduced_root),
    )
    each = job.configuration.strategy == "zero3" or job.configuration.sync_each_micro_batch
    reductions = steps if each else 1
    return forward * steps + quiet * (steps - reductions) + loud * reductions


def _reduced(cluster: Cluster, where: Layout, parameters: float) -> float:
    """Gradients of one unit: reduce-scattered among shards, then all-reduced among replicas."""
    size = parameters * where.reduce_bytes
    scattered = collective_seconds(cluster, "reduce_scatter", size, where.shard_group)
    return scattered + collective_seconds(cluster, "all_reduce", size / where.shards, where.replica_group)
