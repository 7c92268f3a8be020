"""Shard sizes and process groups of a job, as communication, optimizer and offload need them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.cost.precision import communication_bytes, recipe_of
from planner.cost.timing.collectives import Group, group
from planner.cost.timing.flops import executed_layers, job_stacks
from planner.cost.timing.stacks import USUAL_MATMULS
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

# Communication that compute does not hide.


SLOWDOWN = 1.15
"""Compute and communication slow each other while both run: 1.1 to 1.3 measured by Galvatron's hardware profiler."""

SERIAL_SLOWDOWN = 2.0
"""The same on CPUs, where both run on the same cores: what one gets, the other waits for."""


def beside(compute: float, communication: float, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute that starts with it; `slowdown` holds while both run."""
    if communication > compute:
        return communication - compute + (slowdown - 1) * compute
    return (slowdown - 1) * communication


def exposed_seconds(compute: float, communication: float, startup: float = 0.0, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute on a second stream.

    `startup` is the part that must finish before compute can begin or that only begins when compute has ended; the rest
    runs beside compute.
    """
    startup = min(startup, communication)
    return startup + beside(compute, communication - startup, slowdown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank of the busiest pipeline stage.

    `layers` blocks of `block` parameters in `products` modules, and `root` parameters outside blocks, `embedding` of
    them last in the backward; all divided by tp. Widths are bytes per
    parameter of what is all-gathered (of blocks apart), of what is reduced, of that between ranks, and of a stored
    gradient.
    """

    layers: int
    share_of_layers: float
    block: float
    products: float
    root: float
    embedding: float
    shards: int
    shard_group: Group
    replica_group: Group
    gather_bytes: int
    block_gather_bytes: float
    reduce_bytes: int
    communication_bytes: float
    gradient_bytes: int

    @property
    def parameters(self) -> float:
        """Parameters of the stage on one tp rank, before sharding over data-parallel ranks."""
        return self.layers * self.block + self.root

    @property
    def whole_gather_bytes(self) -> float:
        """Bytes per parameter of an all-gather of all of them."""
        if self.block_gather_bytes == self.gather_bytes:
            return self.gather_bytes
        blocks = self.layers * self.block
        return (blocks * self.block_gather_bytes + self.root * self.gather_bytes) / max(self.parameters, 1)

    @property
    def owned(self) -> float:
        """Parameters whose optimizer states this rank holds."""
        return self.parameters / self.shards


def _products_per_block(job: Job) -> float:
    """Modules with weights in an average block; experts count as one each kind of product."""
    stacks = [stack for stack in job_stacks(job) if stack.norms]
    if not stacks:
        return 1.0
    kernels = sum(min(stack.matmuls.kernels, USUAL_MATMULS) * stack.layers for stack in stacks)
    return kernels / sum(stack.layers for stack in stacks)


def layout(job: Job) -> Layout:
    """The layout of a job's busiest stage."""
    configuration, counts = job.configuration, job.counts
    total_layers = executed_layers(job)
    layers = math.ceil(total_layers / configuration.pp)
    outside = counts.outside_blocks
    if configuration.pp > 1:
        outside = max(counts.embedding, counts.head) + counts.other
    sharded = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage > 0
    shards = configuration.dp_shard if sharded else 1
    replicas = configuration.dp_replicate * configuration.dp_shard // shards
    tp = configuration.tp
    recipe = recipe_of(job)
    return Layout(
        layers=layers,
        share_of_layers=layers / total_layers,
        block=counts.in_blocks / total_layers / tp,
        products=_products_per_block(job),
        root=outside / tp,
        embedding=counts.embedding / tp,
        shards=shards,
        shard_group=group(job.cluster, shards, tp),
        replica_group=group(job.cluster, replicas, tp * shards),
        gather_bytes=recipe.gather,
        block_gather_bytes=recipe.gather_of_blocks,
        reduce_bytes=recipe.reduce,
        communication_bytes=communication_bytes(configuration.gradient_compression, recipe.reduce),
        gradient_bytes=recipe.gradient,
    )
