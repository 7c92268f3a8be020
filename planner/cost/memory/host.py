"""Host memory of one node: its processes, the models they load, what is offloaded, what a checkpoint collects.

Sources: torch's `_fully_shard` and `zero_offload.py` for which buffers there are and which are pinned; torch's
`CachingHostAllocator`, which gives a pinned buffer the next power of two of bytes. Page cache, data loader workers, and
what CUDA's libraries map are not counted.
"""

from __future__ import annotations

from hardware_db.units import MIB
from planner.cost.code_bases import code_base
from planner.cost.memory.activations.figures import figures_of
from planner.cost.memory.ledger import States, bytes_at
from planner.cost.memory.load import MADE_BYTES, largest_matrix, made_bytes, saving_of
from planner.cost.memory.states import paged_state_bytes
from planner.cost.memory.units import Units, shards_of, trained_shards_of, weight_bytes
from planner.cost.memory.zero.offload import native_host_buffers, swapping_buffers, zero_host_buffers
from planner.cost.precision import Recipe, recipe_of
from planner.cost.verdict import host_limit
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

# Inputs of checkpointed blocks that wait in host memory, one per block.


def parked_inputs(job: Job, recipe: Recipe) -> list[tuple[int, float]]:
    """Return how many blocks there are of each kind, and the bytes of one's input.

    Nothing where inputs stay on the device, or the device's memory is the host's.
    """
    configuration = job.configuration
    if not configuration.activations_on_host or job.cluster.device.is_cpu:
        return []
    blocks = figures_of(job, recipe).blocks
    return [(block.count, bytes_at(block.boundary, job.sequences)) for block in blocks]


CPU_PROCESS_BYTES = 335 * MIB
"""Resident set of a process after importing torch 2.13 and transformers 5.23 and one backward, measured on Linux."""


def host_bytes(job: Job, states: States, device_used: float) -> float:
    """Return what training or saving takes, whichever is more, on the node of rank 0. A CPU's device is its host."""
    ranks = job.cluster.gpus_per_node
    if job.cluster.device.is_cpu:
        return ranks * device_used
    recipe = recipe_of(job)
    saving = saving_of(job, recipe, states)
    saving_bytes = saving.host_of_rank_0 + (ranks - 1) * saving.host_of_others
    parked = sum(count * pinned_bytes(size) for count, size in parked_inputs(job, recipe))
    paged = paged_state_bytes(job, trained_shards_of(job))
    return ranks * (CPU_PROCESS_BYTES + offloaded_bytes(job, recipe) + parked + paged) + saving_bytes


def host_load_bytes(job: Job) -> float:
    """Return what a node's processes take while the model loads.

    Where the code base makes it whole in every process, and the engine places it from there, these are as many copies;
    where it makes or reads only what is a rank's own, hardly anything.
    """
    if job.cluster.device.is_cpu:
        return 0.0
    ranks = job.cluster.gpus_per_node
    if code_base(job.workload.code).loads != "whole":
        # Made on the meta device or on its GPU; of a checkpoint a rank has one tensor of its own at a time.
        return ranks * (CPU_PROCESS_BYTES + MADE_BYTES * largest_matrix(job))
    return ranks * CPU_PROCESS_BYTES + (1 if loads_once(job) else ranks) * made_bytes(job)


def loads_once(job: Job) -> bool:
    """Return whether a node has no room for a whole model per process and the strategy can do with one.

    FSDP can by accelerate's `cpu_ram_efficient_loading`, ZeRO-3 by DeepSpeed's `zero.Init`.
    """
    if code_base(job.workload.code).loads != "whole":
        return False
    ranks, limit = job.cluster.gpus_per_node, host_limit(job.workload, job.cluster)
    shards = job.configuration.strategy in FSDP_STRATEGIES or job.configuration.zero_stage == 3
    return shards and 0 < limit < ranks * (made_bytes(job) + CPU_PROCESS_BYTES)


def offloaded_bytes(job: Job, recipe: Recipe) -> float:
    """Host bytes that one rank trains with."""
    configuration = job.configuration
    if configuration.offload == "none":
        return 0.0
    if configuration.strategy in FSDP_STRATEGIES:
        return _fsdp(job, recipe)
    if configuration.backend == "native":
        buffers = native_host_buffers(job, recipe)
    elif configuration.offload == "nvme":
        buffers = swapping_buffers(job, recipe)
    else:
        # A flat partition has no rows for Adafactor to factor: it keeps a whole fp32 moment.
        buffers = zero_host_buffers(job, recipe, 4.0 if configuration.optimizer == "adafactor" else recipe.state)
    return sum(map(pinned_bytes, buffers.pinned)) + buffers.other


def pinned_bytes(size: float) -> float:
    """Bytes that a pinned buffer takes."""
    return float(1 << (max(round(size), 1) - 1).bit_length())


def _fsdp(job: Job, recipe: Recipe) -> float:
    """Return shards and their gradients, pinned tensor by tensor, which moments are not.

    Frozen weights are there as they were loaded, without either.
    """
    if recipe.frozen is not None:
        trained = trained_shards_of(job)
        moved = _each_pinned(trained, recipe.reduce) + recipe.state * trained.elements
        return weight_bytes(job, recipe, sharded=True) + moved
    shards = shards_of(job)
    return _each_pinned(shards, recipe.weight) + _each_pinned(shards, recipe.reduce) + recipe.state * shards.elements


def _each_pinned(units: Units, width: float) -> float:
    return sum(unit.repeats * sum(pinned_bytes(size * width) for size in unit.sizes) for unit in units.every)
