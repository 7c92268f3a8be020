"""Shard sizes and process groups of a job, as communication, optimizer and offload need them."""

from __future__ import annotations

import math

from hardware_db.records import dataclass
from planner.cost.memo import memo_by_fields
from planner.cost.precision import RECIPE_FIELDS, Recipe, communication_bytes, recipe_of
from planner.cost.split import blocks_per_stage
from planner.cost.timing.collectives import Group, group
from planner.cost.timing.flops import executed_layers, job_stacks
from planner.cost.timing.stacks import USUAL_MATMULS
from planner.types.job import Job
from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES

QUANTIZED_WEIGHT_BYTES, QUANTIZED_GRADIENT_BYTES = 1.0, 0.5
"""Of ZeRO++: int8 and int4, whose scales are one fp32 number for thousands of elements (DeepSpeed 0.19,
partition_parameters.py, CUDAQuantizer; comm/coalesced_collectives.py, all_to_all_quant_reduce)."""

# Communication that compute does not hide.


SLOWDOWN = 1.15
"""Compute and communication slow each other while both run: 1.1 to 1.3 measured by Galvatron's hardware profiler."""

SERIAL_SLOWDOWN = 2.0
"""The same on CPUs, where both run on the same cores: what one gets, the other waits for."""


def beside(compute: float, communication: float, *, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute that starts with it; `slowdown` holds while both run."""
    if communication > compute:
        return communication - compute + (slowdown - 1) * compute
    return (slowdown - 1) * communication


SPEED_SPREAD = 0.013
"""Standard deviation of the speed of GPUs of one kind at the same work: 8 % lie between the slowest and the fastest of
a cluster on average (Sinha et al. 2022, "Not All GPUs Are Created Equal", SC22, arXiv 2208.11035), which for hundreds
of GPUs is six of these. What llm-foundry, torchtitan and dgxc-benchmarking lose from the smallest to the largest of
their runs beyond communication asks for 0.00 to 0.05 (`python -m scripts.report.known_faults`, scaling)."""

USUAL_RANKS = 8
"""GPUs of a node, whose slowest one is in every rate that was fitted to whole steps."""


def slowest_share(gpus: int) -> float:
    """Return what the slowest of `gpus` takes longer than the slowest of a node, as a share of its compute.

    Nobody goes on in a synchronous step before the slowest has come. The largest of n normal values is expected at
    sqrt(2 ln n) - (ln ln n + ln 4 pi) / (2 sqrt(2 ln n)) standard deviations (Cramer 1946, section 28.6).
    """
    if gpus <= USUAL_RANKS:
        return 0.0
    return SPEED_SPREAD * (_expected_maximum(gpus) - _expected_maximum(USUAL_RANKS))


def _expected_maximum(count: int) -> float:
    root = math.sqrt(2 * math.log(count))
    return root - (math.log(math.log(count)) + math.log(4 * math.pi)) / (2 * root)


def exposed_seconds(compute: float, communication: float, *, startup: float = 0.0, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute on a second stream.

    `startup` is the part that must finish before compute can begin or that only begins when compute has ended; the rest
    runs beside compute.
    """
    startup = min(startup, communication)
    return startup + beside(compute, communication - startup, slowdown=slowdown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank of a pipeline stage, the busiest where stages are as even as they go.

    `layers` blocks of `block` parameters in `products` modules, and `root` parameters outside blocks, `embedding` of
    them last in the backward; all divided by tp. Of a block `experts` are those of routed experts, which are sharded
    over ranks of their own where experts are spread. `backward_group` shares the weights that backward all-gathers,
    where ZeRO++ has a copy of them in a node. Widths are bytes per
    parameter of what is all-gathered (of blocks apart), of what is reduced, of that between ranks, and of a stored
    gradient, the last three over all parameters, of which only `trained` (a share) have gradients and states.
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
    backward_group: Group
    experts: float
    expert_shards: int
    expert_group: Group
    gather_bytes: float
    block_gather_bytes: float
    reduce_bytes: float
    communication_bytes: float
    gradient_bytes: float
    trained: float = 1.0

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
    def local(self) -> float:
        """Parameters of one data-parallel shard, frozen or not."""
        if self.expert_shards == self.shards:
            return self.parameters / self.shards
        experts = self.layers * self.experts
        return (self.parameters - experts) / self.shards + experts / self.expert_shards

    @property
    def owned(self) -> float:
        """Parameters whose optimizer states this rank holds."""
        return self.local * self.trained


def _products_per_block(job: Job) -> float:
    """Modules with weights in an average block; experts count as one each kind of product."""
    stacks = [stack for stack in job_stacks(job) if stack.norms]
    if not stacks:
        return 1.0
    kernels = sum(min(stack.matmuls.kernels, USUAL_MATMULS) * stack.layers for stack in stacks)
    return kernels / sum(stack.layers for stack in stacks)


def _gather_bytes(job: Job, recipe: Recipe, trained: float) -> float:
    """Return the bytes of a parameter that an all-gather moves, on average.

    Trained ones are as they are computed in, frozen ones as they are loaded where that is narrower.
    """
    if recipe.frozen is None:
        return recipe.gather
    held = job.counts.held
    elements = max(held.total, 1)
    blocks = held.in_blocks / elements
    narrow = recipe.frozen_gather if recipe.quantised is None else recipe.quantised
    return trained * recipe.gather + (1 - trained) * (blocks * narrow + (1 - blocks) * recipe.frozen_gather)


def _backward_shards(configuration: Configuration, shards: int) -> int:
    hpz = configuration.hpz_partition_size
    return hpz if hpz > 1 else shards


def _communication_bytes(configuration: Configuration, recipe: Recipe) -> float:
    """Return the bytes of a gradient between ranks.

    ZeRO++ sends 4 bits of it twice, inside a node and between nodes, as a reduce-scatter of both does (arXiv
    2306.10209, section 3.3).
    """
    if configuration.quantized_gradients:
        return QUANTIZED_GRADIENT_BYTES
    return communication_bytes(configuration.gradient_compression, recipe.reduce)


@memo_by_fields(
    *RECIPE_FIELDS,
    *(
        "dp_replicate",
        "ep",
        "virtual_stages",
        "stage_layers",
        "sequence_length",
        "hpz_partition_size",
        "quantized_gradients",
    ),
)
def layout(job: Job) -> Layout:
    """Return the layout of a job's busiest stage; of its own stage where the plan names the blocks of each."""
    configuration, counts = job.configuration, job.counts
    total_layers = executed_layers(job)
    pieces, named = configuration.virtual_stages, configuration.stage_layers
    each = blocks_per_stage(total_layers, pp=configuration.pp, virtual_stages=pieces, named=named)
    layers = each[job.stage] if named else max(each)
    outside = counts.outside_blocks
    if configuration.pp > 1:
        outside = max(counts.embedding, counts.head) + counts.other
    sharded = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage > 0
    shards, expert_shards = (configuration.state_shards, configuration.expert_shards) if sharded else (1, 1)
    replicas = configuration.dp_replicate * configuration.dp_shard * configuration.cp // shards
    tp, ep = configuration.tp, configuration.ep
    routed = sum(block.experts * block.repeats for block in counts.blocks) / total_layers
    experts = routed / (ep if ep > 1 else tp)
    recipe = recipe_of(job)
    trained = 1.0 if counts.trains_all else counts.trained.total / counts.total
    return Layout(
        layers=layers,
        share_of_layers=layers / total_layers,
        block=(counts.in_blocks / total_layers - routed) / tp + experts,
        experts=experts,
        expert_shards=expert_shards,
        expert_group=group(job.cluster, expert_shards, ep if ep > 1 else tp),
        products=_products_per_block(job),
        root=outside / tp,
        embedding=counts.embedding / tp,
        shards=shards,
        shard_group=group(job.cluster, shards, tp),
        replica_group=group(job.cluster, replicas, tp * shards),
        backward_group=group(job.cluster, _backward_shards(configuration, shards), tp),
        gather_bytes=_gather_bytes(job, recipe, trained),
        block_gather_bytes=recipe.gather_of_blocks if recipe.frozen is None else _gather_bytes(job, recipe, trained),
        reduce_bytes=recipe.reduce * trained,
        communication_bytes=_communication_bytes(configuration, recipe) * trained,
        gradient_bytes=recipe.gradient * trained,
        trained=trained,
    )
