"""Communication of data-parallel strategies in one step, and how much of it stays visible.

Each strategy is walked unit by unit on a compute and a communication stream. Units of a kind are equal, so the walk has
three stops: the first unit, those between, the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hardware_db.units import MIB
from planner.cost.code_bases import Implementation
from planner.cost.timing.collectives import Collective, Group, collective_seconds
from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.layout import SERIAL_SLOWDOWN, SLOWDOWN, Layout, beside, exposed_seconds
from planner.cost.timing.pipeline import Stage
from planner.cost.zero_buckets import zero_buckets
from planner.types.job import Job

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One rank of the busiest stage: its layout, its compute per micro-batch, and what hides what."""

    job: Job
    where: Layout
    stage: Stage
    slowdown: float
    code: Implementation

    @property
    def rounds(self) -> int:
        return self.job.configuration.gradient_accumulation_steps

    @property
    def behind_reductions(self) -> float:
        """Backward of one micro-batch, as far as this code reduces beside it."""
        return self.stage.backward if self.code.hides_reductions else 0.0

    def collective(self, name: Collective, elements: float, width: float, members: Group) -> float:
        return collective_seconds(self.job.cluster, name, elements * width, members)

    def gathered(self, elements: float) -> float:
        return self.collective("all_gather", elements, self.where.gather_bytes, self.where.shard_group)

    def reduced(self, elements: float) -> float:
        """Gradients reduce-scattered among shards, then all-reduced among replicas."""
        width, where = self.where.wire_bytes, self.where
        scattered = self.collective("reduce_scatter", elements, width, where.shard_group)
        return scattered + self.collective("all_reduce", elements / where.shards, width, where.replica_group)


def data_parallel(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Communication:
    """Communication of the whole step, given the compute of one micro-batch on one rank."""
    if where.shards == where.replica_group.size == 1:
        return Communication()
    walk = Walk(
        job=job,
        where=where,
        stage=stage,
        slowdown=SERIAL_SLOWDOWN if rates.serial else SLOWDOWN,
        code=rates.code,
    )
    strategy = job.configuration.strategy
    if strategy in ("ddp", "single"):
        return _replicated(walk)
    if strategy in ("zero1", "zero2"):
        return _sharded_optimizer(walk)
    return _partitioned(walk) if strategy == "zero3" else _fully_sharded(walk)


def _replicated(walk: Walk) -> Communication:
    """DDP: gradients all-reduced once per step in buckets, behind the last micro-batch's backward.

    The embedding's gradient comes last of all and in one piece, so that nothing is left to hide it.
    """
    where = walk.where
    last = max(min(DDP_BUCKET_BYTES / where.reduce_bytes, where.parameters), where.embedding)
    early = where.parameters - last
    buckets = max(1, math.ceil(early * where.reduce_bytes / DDP_BUCKET_BYTES))
    tail = walk.collective("all_reduce", last, where.wire_bytes, where.replica_group)
    total = tail + buckets * walk.collective("all_reduce", early / buckets, where.wire_bytes, where.replica_group)
    return Communication(total=total, exposed=exposed_seconds(walk.behind_reductions, total, tail, walk.slowdown))


def _sharded_optimizer(walk: Walk) -> Communication:
    """ZeRO-1 reduces once per step, ZeRO-2 every micro-batch; updated parameters are gathered at the end, unhidden.

    A reduction starts when its bucket is full: a model smaller than the bucket waits for the end of the backward.
    """
    where = walk.where
    limits = zero_buckets(2, parameters=round(where.parameters), hidden_size=walk.job.facts.hidden_size)
    buckets = math.ceil(where.parameters / limits.reduce)
    bucket = _zero_reduction(walk, where.parameters / buckets)
    hidden = (buckets - 1) * beside(walk.behind_reductions / buckets, bucket, walk.slowdown)
    once = Communication(total=buckets * bucket, exposed=hidden + bucket)
    gathered = _updated_parameters(walk)
    rounds = walk.rounds if walk.job.configuration.zero_stage == 2 else 1
    return once * rounds + Communication(total=gathered, exposed=gathered)


def _zero_reduction(walk: Walk, elements: float) -> float:
    """DeepSpeed all-reduces a bucket and keeps its part of it (stage_1_and_2.py, `use_multi_rank_bucket_allreduce`)."""
    where = walk.where
    if not walk.code.reduces_whole:
        return walk.reduced(elements)
    shared = walk.collective("all_reduce", elements, where.wire_bytes, where.shard_group)
    return shared + walk.collective("all_reduce", elements / where.shards, where.wire_bytes, where.replica_group)


def _updated_parameters(walk: Walk) -> float:
    """Every rank's part of the parameters to all others: one all-gather, or a broadcast from each rank in turn."""
    where = walk.where
    if not walk.code.broadcasts_partitions:
        return walk.gathered(where.parameters)
    return where.shards * walk.collective("broadcast", where.owned, where.gather_bytes, where.shard_group)


def _fully_sharded(walk: Walk) -> Communication:
    """FSDP: blocks gathered before forward and again before backward, one ahead of compute.

    Gradients of one block are reduced beside the backward of the block before it; in every micro-batch, unless the plan
    accumulates without synchronisation. `fsdp-grad-op` gathers once: parameters stay whole until the backward's end.
    """
    where, block, layers = walk.where, walk.stage.block, walk.where.layers
    gather, root = walk.gathered(where.block), walk.gathered(where.root)
    forward = Communication(
        total=layers * gather + root,
        exposed=root + gather + (layers - 1) * beside(block.forward, gather, walk.slowdown),
    )
    again = 0.0 if walk.job.configuration.strategy == "fsdp-grad-op" else gather
    quiet = _backward(walk, again, 0.0, 0.0)
    loud = _backward(walk, again, walk.reduced(where.block), walk.reduced(where.root))
    reductions = walk.rounds if walk.job.configuration.sync_each_micro_batch else 1
    return forward * walk.rounds + quiet * (walk.rounds - reductions) + loud * reductions


def _backward(walk: Walk, gather: float, reduce: float, reduce_root: float) -> Communication:
    """The head's backward hides the last block's gather; a block's own hides the gather of the one before it and the
    reduction of the one after it. The first block's reduction and the root's come after all compute."""
    stage, layers = walk.stage, walk.where.layers
    compute = stage.block.backward + stage.block.recomputed
    exposed = beside(stage.head.backward, gather, walk.slowdown) + reduce + reduce_root
    if layers > 1:
        exposed += beside(compute, gather, walk.slowdown) + beside(compute, reduce, walk.slowdown)
        exposed += (layers - 2) * beside(compute, gather + reduce, walk.slowdown)
    return Communication(total=layers * (gather + reduce) + reduce_root, exposed=exposed)


def _partitioned(walk: Walk) -> Communication:
    """ZeRO-3: modules gathered one by one, far ahead of compute; gradients reduced in small buckets behind it.

    The first module's gather and the embedding's reduction stay visible. What is used again within
    `max_reuse_distance` elements of its last use is not let go of in between.
    """
    where, stage = walk.where, walk.stage
    limits = zero_buckets(3, parameters=round(where.parameters), hidden_size=walk.job.facts.hidden_size)
    module = walk.gathered(where.block / where.products)
    forward_total = where.layers * where.products * module + walk.gathered(where.root)
    again = max(0.0, 1 - limits.max_reuse_distance / 2 / where.parameters) * forward_total
    reduce = math.ceil(where.parameters / limits.reduce) * walk.reduced(min(limits.reduce, where.parameters))
    tail = walk.reduced(where.embedding or limits.reduce)
    backward = Communication(
        total=again + reduce, exposed=exposed_seconds(stage.backward, again + reduce, tail, walk.slowdown)
    )
    forward = Communication(
        total=forward_total, exposed=exposed_seconds(stage.forward, forward_total, module, walk.slowdown)
    )
    return (forward + backward) * walk.rounds
