"""Communication of data-parallel strategies in one step, and how much of it stays visible.

Each strategy is walked unit by unit on a compute and a communication stream. Units of a kind are equal, so the walk has
three stops: the first unit, those between, the last. `timeline` draws the same walk.
"""

from __future__ import annotations

import math

from hardware_db.records import dataclass
from hardware_db.units import MIB
from planner.cost.code_bases import Implementation
from planner.cost.split import keeps_stage_whole, reduces_each_micro_batch, reshards_weights
from planner.cost.timing.collectives import Collective, Group, collective_seconds
from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.layout import QUANTIZED_WEIGHT_BYTES, SERIAL_SLOWDOWN, SLOWDOWN, Layout, beside
from planner.cost.timing.pipeline import Stage
from planner.cost.zero_bucket_sizes import zero_buckets
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


Unit = tuple[float, float, float, str]
"""How many alike, each with seconds of compute and of communication that start together, and what is communicated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The units of a step that communicate.

    They do in the forward passes of `gathers` micro-batches, in the backward passes of those that reduce nothing
    (`quiet`) and of the `reductions` that do, and at the end of the step.
    """

    forward: tuple[Unit, ...] = ()
    gathers: int = 0
    quiet: tuple[Unit, ...] = ()
    reduced: tuple[Unit, ...] = ()
    reductions: int = 0
    end: tuple[Unit, ...] = ()

    def communication(self, rounds: int, slowdown: float) -> Communication:
        """All of it, and what no compute hides, in a step of so many micro-batches."""
        total = exposed = 0.0
        for repeats, units in (
            (self.gathers, self.forward),
            (rounds - self.reductions, self.quiet),
            (self.reductions, self.reduced),
            (1, self.end),
        ):
            for count, compute, communication, _ in units:
                total += repeats * count * communication
                exposed += repeats * count * beside(compute, communication, slowdown=slowdown)
        return Communication(total=total, exposed=exposed)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """One rank of the busiest stage: its layout, its compute per micro-batch, and whose code runs."""

    job: Job
    where: Layout
    stage: Stage
    code: Implementation

    @property
    def rounds(self) -> int:
        """Micro-batches of a step."""
        return self.job.configuration.gradient_accumulation_steps

    @property
    def behind_reductions(self) -> float:
        """Backward of one micro-batch, as far as this code reduces beside it."""
        return self.stage.backward if self.code.hides_reductions else 0.0

    def collective(self, name: Collective, elements: float, width: float, members: Group) -> float:
        """Return the seconds of a collective of `elements` of `width` bytes each between `members`."""
        return collective_seconds(self.job.cluster, name, elements * width, members)

    @property
    def spread_experts(self) -> float:
        """Elements of a block that are sharded over other ranks than the rest."""
        return 0.0 if self.where.expert_shards == self.where.shards else self.where.experts

    def all_gather(self, elements: float, width: float | None = None) -> float:
        """Parameters all-gathered among shards, `width` bytes each where those are not the root's."""
        return self.collective("all_gather", elements, width or self.where.gather_bytes, self.where.shard_group)

    def all_gather_block(self) -> float:
        """Return the seconds of all-gathering the parameters of a block."""
        where, experts = self.where, self.spread_experts
        seconds = self.all_gather(where.block - experts, where.block_gather_bytes)
        return seconds + self.collective("all_gather", experts, where.block_gather_bytes, where.expert_group)

    @property
    def sums_replicas_once(self) -> bool:
        """True if replicas of shards add up what micro-batches leave, once in a step: our own ZeRO."""
        return self.job.configuration.backend == "native" and self.where.replica_group.size > 1

    def reduce_scatter(self, elements: float, *, replicas: bool = True) -> float:
        """Gradients reduce-scattered among shards, then all-reduced among `replicas`."""
        where = self.where
        scattered = self.collective("reduce_scatter", elements, where.communication_bytes, where.shard_group)
        return scattered + (self.all_reduce_shards(elements) if replicas else 0.0)

    def all_reduce_shards(self, elements: float) -> float:
        """Return the seconds of all-reducing a shard of gradients among replicas: as they travel, or as they wait."""
        where = self.where
        width = where.gradient_bytes if self.sums_replicas_once else where.communication_bytes
        return self.collective("all_reduce", elements / where.shards, width, where.replica_group)

    def reduce_scatter_block(self) -> float:
        """Return the seconds of reduce-scattering the gradients of a block."""
        where, experts = self.where, self.spread_experts
        seconds = self.reduce_scatter(where.block - experts)
        width = where.communication_bytes
        seconds += self.collective("reduce_scatter", experts, width, where.expert_group)
        return seconds + self.collective("all_reduce", experts / where.expert_shards, width, where.replica_group)

    @property
    def replicas_apart(self) -> bool:
        """True if shards are gathered over links inside a node and replicas reduced over those between nodes.

        FSDP has a stream of its own for either (`all_reduce_stream`, torch/distributed/fsdp/_fully_shard
        /_fsdp_param_group.py; `_all_reduce_stream` of FSDP1), so that neither waits for the other.
        """
        return self.where.shard_group.nodes == 1 < self.where.replica_group.nodes


def data_parallel(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Communication:
    """Communication of the whole step, given the compute of one micro-batch on one rank."""
    slowdown = SERIAL_SLOWDOWN if rates.serial else SLOWDOWN
    return walk(job, where, stage, rates).communication(job.configuration.gradient_accumulation_steps, slowdown)


def walk(job: Job, where: Layout, stage: Stage, rates: DeviceRates) -> Walk:
    """Return the units of a step that communicate, given the compute of one micro-batch on one rank."""
    if where.shards == where.replica_group.size == 1:
        return Walk()
    context = StepContext(job=job, where=where, stage=stage, code=rates.code)
    strategy = job.configuration.strategy
    if strategy in ("ddp", "single"):
        return _replicated(context)
    if strategy in ("zero1", "zero2"):
        return _sharded_optimizer(context)
    return _partitioned(context) if strategy == "zero3" else _fully_sharded(context)


def _replicated(context: StepContext) -> Walk:
    """DDP: gradients all-reduced once per step in buckets, behind the last micro-batch's backward.

    The embedding's gradient comes last of all and in one piece, so that nothing is left to hide it.
    """
    where = context.where
    last = max(min(DDP_BUCKET_BYTES / where.reduce_bytes, where.parameters), where.embedding)
    early = where.parameters - last
    buckets = max(1, math.ceil(early * where.reduce_bytes / DDP_BUCKET_BYTES))
    tail = context.collective("all_reduce", last, where.communication_bytes, where.replica_group)
    hidden = buckets * context.collective("all_reduce", early / buckets, where.communication_bytes, where.replica_group)
    units = ((1, context.behind_reductions, hidden, "all_reduce"), (1, 0.0, tail, "all_reduce"))
    return Walk(reduced=units, reductions=1)


def _sharded_optimizer(context: StepContext) -> Walk:
    """ZeRO-1 reduces once per step, ZeRO-2 every micro-batch; updated parameters are all-gathered at the end, unhidden.

    A reduction starts when its bucket is full: a model smaller than the bucket waits for the end of the backward.
    """
    where = context.where
    limits = zero_buckets(2, parameters=round(where.parameters), hidden_size=context.job.facts.hidden_size)
    buckets = math.ceil(where.parameters / limits.reduce)
    kind = "all_reduce" if context.code.reduces_whole else "reduce_scatter"
    share = context.behind_reductions / buckets

    def reducing(bucket: float) -> tuple[Unit, ...]:
        return (buckets - 1, share, bucket, kind), (1, share, 0.0, kind), (1, 0.0, bucket, kind)

    each, once = context.job.configuration.zero_stage == 2, context.sums_replicas_once
    gathered = "broadcast" if context.code.broadcasts_partitions else "all_gather"
    return Walk(
        quiet=reducing(_zero_reduction(context, where.parameters / buckets, replicas=False)) if each and once else (),
        reduced=reducing(_zero_reduction(context, where.parameters / buckets)),
        reductions=context.rounds if each and not once else 1,
        end=((1, 0.0, _updated_parameters(context), gathered),),
    )


def _zero_reduction(context: StepContext, elements: float, *, replicas: bool = True) -> float:
    """DeepSpeed all-reduces a bucket and keeps its part of it (stage_1_and_2.py, `use_multi_rank_bucket_allreduce`)."""
    where = context.where
    if not context.code.reduces_whole:
        return context.reduce_scatter(elements, replicas=replicas)
    shared = context.collective("all_reduce", elements, where.communication_bytes, where.shard_group)
    return shared + (context.all_reduce_shards(elements) if replicas else 0.0)


def _updated_parameters(context: StepContext) -> float:
    """Every rank's part of the parameters to all others: one all-gather, or a broadcast from each rank in turn."""
    where = context.where
    if not context.code.broadcasts_partitions:
        return context.all_gather(where.parameters, where.whole_gather_bytes)
    return where.shards * context.collective("broadcast", where.owned, where.whole_gather_bytes, where.shard_group)


def _fully_sharded(context: StepContext) -> Walk:
    """FSDP: blocks all-gathered before forward and again before backward, one ahead of compute.

    Gradients of one block are reduced beside the backward of the block before it; in every micro-batch, unless the plan
    accumulates without synchronisation. `fsdp-grad-op` gathers once: parameters stay whole until the backward's end. So
    they do in the pipelines of some code bases until the last micro-batch's, which reduces the gradients.
    """
    where, block, layers = context.where, context.stage.block, context.where.layers
    gather, root = context.all_gather_block(), context.all_gather(where.root)
    again = gather if reshards_weights(context.job) else 0.0
    return Walk(
        forward=((1, 0.0, root + gather, "all_gather"), (layers - 1, block.forward, gather, "all_gather")),
        gathers=1 if keeps_stage_whole(context.job) else context.rounds,
        quiet=_backward(context, gather=again),
        reduced=_backward(
            context, gather=again, reduce=context.reduce_scatter_block(), reduce_root=context.reduce_scatter(where.root)
        ),
        reductions=context.rounds if reduces_each_micro_batch(context.job) else 1,
    )


def _backward(
    context: StepContext, *, gather: float, reduce: float = 0.0, reduce_root: float = 0.0
) -> tuple[Unit, ...]:
    """Return the units of a backward pass, whose compute hides neighbours' collectives.

    The head's backward hides the last block's gather; a block's own hides the gather of the one before it and the
    reduction of the one after it. The first block's reduction and the root's come after all compute.
    """
    stage, layers = context.stage, context.where.layers
    compute = stage.block.backward + stage.block.recomputed
    both = "all_gather + reduce_scatter" if gather and reduce else "all_gather" if gather else "reduce_scatter"
    between: tuple[Unit, ...] = ()
    apart = context.all_reduce_shards(context.where.block) if reduce and context.replicas_apart else 0.0
    if layers > 1:
        between = (
            (1, compute, gather, "all_gather"),
            (layers - 2, compute, max(gather + reduce - apart, apart), both),
            (1, compute, reduce, "reduce_scatter"),
        )
    head = (1, stage.head.backward, gather, "all_gather")
    return (head, *between, (1, 0.0, reduce + reduce_root, "reduce_scatter"))


def _partitioned(context: StepContext) -> Walk:
    """ZeRO-3: modules all-gathered one by one, far ahead of compute; gradients reduced in small buckets behind it.

    ZeRO++ sends weights in 8 bits, and all-gathers them in a node for the backward. The first module's gather and the
    embedding's reduction stay visible. What is used again within
    `max_reuse_distance` elements of its last use is not freed in between.
    """
    where, stage = context.where, context.stage
    limits = zero_buckets(3, parameters=round(where.parameters), hidden_size=context.job.facts.hidden_size)
    module = _weights(context, where.block / where.products, where.shard_group)
    gathers = where.layers * where.products * module + _weights(context, where.root, where.shard_group)
    again = where.layers * where.products * _weights(context, where.block / where.products, where.backward_group)
    again += _weights(context, where.root, where.backward_group)
    again *= max(0.0, 1 - limits.max_reuse_distance / 2 / where.parameters)
    buckets, last = math.ceil(where.parameters / limits.reduce), where.embedding or limits.reduce
    both = "all_gather + reduce_scatter" if again else "reduce_scatter"

    def reducing(*, replicas: bool) -> tuple[Unit, ...]:
        reduce = buckets * context.reduce_scatter(min(limits.reduce, where.parameters), replicas=replicas)
        tail = min(context.reduce_scatter(last, replicas=replicas), again + reduce)
        return (1, stage.backward, again + reduce - tail, both), (1, 0.0, tail, "reduce_scatter")

    return Walk(
        forward=((1, 0.0, module, "all_gather"), (1, stage.forward, gathers - module, "all_gather")),
        gathers=context.rounds,
        quiet=reducing(replicas=False) if context.sums_replicas_once else (),
        reduced=reducing(replicas=True),
        reductions=1 if context.sums_replicas_once else context.rounds,
    )


def _weights(context: StepContext, elements: float, members: Group) -> float:
    """Return the seconds of all-gathering weights between the ranks that share them, or a copy of them."""
    narrow = context.job.configuration.quantized_weights
    width = QUANTIZED_WEIGHT_BYTES if narrow else context.where.gather_bytes
    return context.collective("all_gather", elements, width, members)
