"""Host memory of one node: its processes, the models they load, what is offloaded, what a checkpoint collects.

Sources: DeepSpeed 0.19's `stage_1_and_2.py`, `stage3.py`, `swap_tensor/` and `cpu_adam.py`, torch's `_fully_shard`, for
which buffers there are and which are pinned; torch's `CachingHostAllocator`, which gives a pinned buffer the next power
of two of bytes. Page cache, data loader workers, and what CUDA's libraries map are not counted.
"""

from __future__ import annotations

from hardware_db.units import MIB
from planner.job import Job
from planner.memory.load import load_of
from planner.memory.recipe import Recipe, recipe_of
from planner.memory.saving import saving_of
from planner.memory.states import States
from planner.memory.units import Units, shards_of, units_of
from planner.verdict import host_limit
from planner.vocabulary import FSDP_STRATEGIES
from planner.zero_buckets import zero_buckets

CPU_PROCESS_BYTES = 335 * MIB
"""Resident set of a process after importing torch 2.13 and transformers 5.23 and one backward, measured on Linux."""
SWAP_BUFFERS = {"optimizer": 4, "parameters": 5}
"""Buffers of the emitted NVMe configs (`planner/emit/deepspeed.py`)."""
SWAP_BUFFER_ELEMENTS = 100_000_000


def host_bytes(job: Job, states: States, device_used: float) -> float:
    """What training takes, or saving where it takes more, on the node that holds rank 0. A CPU's device is its host."""
    ranks = job.cluster.gpus_per_node
    if job.cluster.device.is_cpu:
        return ranks * device_used
    recipe = recipe_of(job.configuration)
    saving = saving_of(job, recipe, states)
    collected = saving.host_of_rank_0 + (ranks - 1) * saving.host_of_others
    return ranks * (CPU_PROCESS_BYTES + offloaded_bytes(job, recipe, states)) + collected


def host_load_bytes(job: Job, states: States) -> float:
    """What a node's processes take while each makes its model in host memory, and the engine places it from there.

    FSDP and ZeRO-3 do without so many copies (accelerate's `cpu_ram_efficient_loading`, DeepSpeed's `zero.Init`), so
    that one is counted where a node has no room for one per process.
    """
    cluster = job.cluster
    if cluster.device.is_cpu:
        return 0.0
    made = load_of(job, recipe_of(job.configuration), states).host_bytes
    processes = cluster.gpus_per_node * CPU_PROCESS_BYTES
    everywhere, limit = processes + cluster.gpus_per_node * made, host_limit(job.workload, cluster)
    shards = job.configuration.strategy in FSDP_STRATEGIES or job.configuration.zero_stage == 3
    return processes + made if shards and limit and everywhere > limit else everywhere


def offloaded_bytes(job: Job, recipe: Recipe, states: States) -> float:
    """Host bytes that one rank trains with."""
    configuration = job.configuration
    if configuration.offload == "none":
        return 0.0
    if configuration.strategy in FSDP_STRATEGIES:
        return _fsdp(job, recipe)
    if configuration.zero_stage < 3:
        return _flat_partition(job, recipe, states)
    return _partitioned(job, recipe, states)


def pinned(size: float) -> float:
    """Bytes that a pinned buffer takes."""
    return float(1 << (max(round(size), 1) - 1).bit_length())


def _fsdp(job: Job, recipe: Recipe) -> float:
    """Shards and their gradients pinned, tensor by tensor; moments are not."""
    shards = shards_of(job)
    return _each_pinned(shards, recipe.weight) + _each_pinned(shards, recipe.reduce) + recipe.state * shards.elements


def _each_pinned(units: Units, width: float) -> float:
    return sum(unit.repeats * sum(pinned(size * width) for size in unit.sizes) for unit in units.every)


def _flat_partition(job: Job, recipe: Recipe, states: States) -> float:
    """ZeRO-1 and 2: master, its gradient and a 16-bit copy of the partition pinned, the moments not, and a pinned
    buffer for the largest gradient; accumulation keeps the partition's gradients, pinned one by one."""
    local, units = states.local, units_of(job)
    total = 2 * pinned(recipe.master * local) + pinned(recipe.weight * local) + recipe.state * local
    total += pinned(recipe.gradient * units.largest)
    if job.configuration.gradient_accumulation_steps > 1:
        total += _each_pinned(units, recipe.gradient) / job.configuration.dp_shard
    return total


def _partitioned(job: Job, recipe: Recipe, states: States) -> float:
    """ZeRO-3: master and moments, a pinned gradient for each sub-group and one flat in the weights' dtype; `all` adds
    the weights, pinned; `nvme` keeps buffers for a sub-group's states and some parameters instead."""
    local, offload = states.local, job.configuration.offload
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    group = min(local, buckets.sub_group)
    gradients = pinned(recipe.gradient * local)
    if offload == "nvme":
        return gradients + _swapping(job, recipe, group)
    on_host = (recipe.master + recipe.state) * local + gradients + local / max(group, 1) * pinned(recipe.master * group)
    return on_host + (pinned(recipe.weight * local) if offload == "all" else 0.0)


def _swapping(job: Job, recipe: Recipe, group: float) -> float:
    """Page-locked buffers of exact size, and the weights that stay in host memory up to `max_in_cpu`."""
    table = job.facts.vocab_size * job.facts.hidden_size / job.configuration.dims.data_parallel
    parameters = SWAP_BUFFERS["parameters"] * recipe.weight * max(SWAP_BUFFER_ELEMENTS, table)
    return SWAP_BUFFERS["optimizer"] * recipe.master * group + parameters + pinned(recipe.weight * group)
