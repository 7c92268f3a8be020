"""Host memory of one node: its processes, the models they load, what is offloaded, what a checkpoint collects.

Sources: torch's `_fully_shard` and `zero_offload.py` for which buffers there are and which are pinned; torch's
`CachingHostAllocator`, which gives a pinned buffer the next power of two of bytes. Page cache, data loader workers, and
what CUDA's libraries map are not counted.
"""

from __future__ import annotations

from typing import Literal

from hardware_db.units import MIB
from planner.cost.code_bases import code_base
from planner.cost.memory.activations.figures import figures_of
from planner.cost.memory.ledger import States, bytes_at
from planner.cost.memory.load import MADE_BYTES, largest_matrix, made_bytes, saving_of
from planner.cost.memory.states import paged_state_bytes
from planner.cost.memory.units import Units, shards_of, trained_shards_of, weight_bytes
from planner.cost.memory.zero.offload import native_host_buffers, swapping_buffers, zero_host_buffers
from planner.cost.precision import LOADED_BYTES, Recipe, load_dtype_of, recipe_of
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


READ_BYTES = 32 * MIB
"""Rows of a file that a process has in memory while it reads its own parts (`strategies/checkpoint/storage.py`)."""
FILE_BYTES = 2
"""Per parameter of what is published: 16 bits."""
NO_ROOM_TO_LOAD = "a node has no room to load"
"""Beginning of a plan's note on how its model must be loaded, by which configs find it."""
Loading = Literal["own", "mapped", "whole", "once", "streamed"]
"""How the processes of a node come to a model's weights.

* own: the code base makes or reads only what is a rank's own
* mapped: files are mapped, and tensors go to the card one after the other and are quantised there: all of them to each
* whole: every process makes all of it in host memory
* once: one process of the node does, and the others get their shards of it
* streamed: every process reads its own parts from the files (`dsplan.initialize(weights=...)`)
"""


def host_load_bytes(job: Job) -> float:
    """Return what a node's processes take while the model loads (`loading_of`), without pages of mapped files."""
    if job.cluster.device.is_cpu:
        return 0.0
    return _load_bytes(job, loading_of(job))


def loading_of(job: Job) -> Loading:
    """Return how a job's model is loaded: as scripts do it, or where that has no room on a node, the first that has."""
    if code_base(job.workload.code).loads != "whole":
        return "own"
    quantised = _is_quantised(job)
    shards = job.configuration.strategy in FSDP_STRATEGIES or job.configuration.zero_stage == 3
    if quantised and not shards and not job.configuration.splits_model:
        # transformers 5.23: bitsandbytes' quantiser takes the card where no device_map is given
        # (`quantizer_bnb_4bit.py`), and reads tensors in turn (`core_model_loading.py`, has_on_the_fly_quantization).
        return "mapped"
    ways: list[Loading] = ["whole"]
    if shards and not quantised:
        ways.append("once")  # FSDP by accelerate's `cpu_ram_efficient_loading`, ZeRO-3 by DeepSpeed's `zero.Init`
    if streams(job):
        ways.append("streamed")
    limit = host_limit(job.workload, job.cluster)
    if not limit:
        return "whole"
    return next((loading for loading in ways if _load_bytes(job, loading) <= limit), ways[-1])


def streams(job: Job) -> bool:
    """Return whether our engine can read a job's weights part by part; DoRA's magnitudes are made of whole ones."""
    return code_base(job.workload.code).runs_with == "dsplan" and job.workload.method != "dora"


def _is_quantised(job: Job) -> bool:
    return LOADED_BYTES[load_dtype_of(job.workload) or "fp32"] < FILE_BYTES


def _load_bytes(job: Job, loading: Loading) -> float:
    ranks, matrix = job.cluster.gpus_per_node, largest_matrix(job)
    processes = ranks * CPU_PROCESS_BYTES
    if loading == "own":
        # Made on the meta device or on its GPU; of a checkpoint a rank has one tensor of its own at a time.
        return processes + ranks * MADE_BYTES * matrix
    if loading == "mapped":
        return processes + ranks * FILE_BYTES * matrix
    if loading == "streamed":
        # What is stored in 4 bits is read whole, one tensor after the other.
        return processes + ranks * (READ_BYTES + (FILE_BYTES * matrix if _is_quantised(job) else 0))
    return processes + (1 if loading == "once" else ranks) * made_bytes(job)


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
