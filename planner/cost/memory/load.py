"""Memory of loading: the device while the engine places a model that was made on the host.

`strategies/` and the libraries under it decide: torch moves a replica tensor by tensor, and DDP makes its buckets at
once; FSDP2 moves one wrapped unit at a time and keeps its shards (`fsdp/_fully_shard`); DeepSpeed 0.19 copies the
weights of ZeRO-1 and 2 into one flat tensor (`stage_1_and_2.py`), and is handed those of ZeRO-3 one parameter at a time
(`strategies/backends/deepspeed/engine.py`, `stage3.py`). No optimizer has moments before its first step.
"""

from __future__ import annotations

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.cost.memory.ledger import Ledger, States
from planner.cost.memory.units import mean_width, trained_units_of, units_of
from planner.cost.precision import LOADED_BYTES, Recipe, has_own_states, load_dtype_of
from planner.cost.zero_bucket_sizes import zero_buckets
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

MADE_BYTES = 4
"""Per parameter of a model as a script makes it: fp32, torch's default."""
BROADCAST_BYTES = 2 * (250 << 20)
"""DDP sends rank 0's weights in flat tensors of 250 MiB, two at a time (torch `nn/parallel/distributed.py`; traced)."""


def made_bytes(job: Job) -> float:
    """Return the bytes of the whole model as a script makes it.

    It does as `from_pretrained(dtype=...)` is asked to, else in fp32. A quantised one is read in 16 bits.
    """
    loaded = load_dtype_of(job.workload)
    return (MADE_BYTES if loaded is None else max(LOADED_BYTES[loaded], 2)) * job.counts.total


def load_ledger(job: Job, recipe: Recipe, states: States) -> Ledger:
    """Return the most that one rank's device holds while the model is placed; on a CPU it lies there before."""
    placed = _placed(job, recipe, states)
    if not job.cluster.device.is_cpu:
        return placed
    first_form = Ledger(parameters=made_bytes(job), temporaries=_beside_the_whole(job, recipe))
    return max(first_form, placed, key=_total)


def _placed(job: Job, recipe: Recipe, states: States) -> Ledger:
    configuration = job.configuration
    if has_own_states(code_base(job.workload.code), configuration):
        # Made on the device, then the master copies of what is the rank's own.
        return Ledger(parameters=recipe.weight * states.elements, optimizer=recipe.master * states.stepped)
    if configuration.strategy in FSDP_STRATEGIES:
        return _sharded(job, recipe)
    if configuration.zero_stage == 3:
        return _partitioned(job, recipe, states)
    if configuration.zero_stage:
        return _flattened(job, recipe, states)
    weights = mean_width(job, recipe) * states.elements
    if configuration.strategy == "single":
        return Ledger(parameters=weights)
    # The weights have been sent when the buckets are made.
    return Ledger(parameters=weights, buffers=max(min(BROADCAST_BYTES, weights), recipe.gradient * states.stepped))


def _beside_the_whole(job: Job, recipe: Recipe) -> float:
    """Return what is made before any of the model's first form is freed: a unit's shards, or one weight's cast copy."""
    if job.configuration.strategy in FSDP_STRATEGIES:
        return recipe.weight * job.counts.largest_block / job.configuration.state_shards
    return recipe.weight * largest_matrix(job) if recipe.weight != MADE_BYTES else 0.0


def _sharded(job: Job, recipe: Recipe) -> Ledger:
    """Return the largest moment of sharding.

    The blocks come one after the other, then the root with what is left, each whole with its shards; of those before
    there are shards.
    """
    units, configuration = units_of(job), job.configuration
    width = mean_width(job, recipe)
    shards = width / configuration.state_shards
    kept = shards if configuration.offload == "none" else 0.0
    last_block = kept * (units.in_blocks - units.largest_block) + (width + shards) * units.largest_block
    root = kept * units.in_blocks + (width + shards) * units.root.elements
    if code_base(job.workload.code).loads == "gathered":
        root = kept * units.elements + width * units.elements
    return Ledger(parameters=max(last_block, root))


def _flattened(job: Job, recipe: Recipe, states: States) -> Ledger:
    """Return the largest moment of ZeRO-1 and 2.

    It has the weights and a flat copy of those that are trained, then the flat one with the rank's master copy and its
    gradient.

    DeepSpeed makes the flat copy on the host where the device has no room for it.
    """
    weights = mean_width(job, recipe) * states.elements
    flat = recipe.weight * trained_units_of(job).elements
    flat = flat if weights + flat <= job.cluster.capacity_bytes else 0.0
    flattening = Ledger(parameters=weights, temporaries=flat)
    if job.configuration.offload != "none":
        return flattening
    width = recipe.master
    clone = recipe.weight if recipe.weight != width else 0
    master = Ledger(
        parameters=weights, optimizer=width * states.stepped, temporaries=max(clone, width) * states.stepped
    )
    return max(flattening, master, key=_total)


def _partitioned(job: Job, recipe: Recipe, states: States) -> Ledger:
    """ZeRO-3: a whole parameter among partitions, the master copy cast and cloned, a whole one again for its hooks."""
    configuration, width = job.configuration, recipe.master
    kept = mean_width(job, recipe) * states.local if configuration.offload in ("none", "optimizer") else 0.0
    whole = recipe.weight * largest_matrix(job)
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    bucket = recipe.gradient * buckets.reduce
    splitting = Ledger(parameters=kept, temporaries=whole * (1 + 1 / configuration.state_shards))
    if configuration.offload != "none":
        return max(splitting, Ledger(parameters=kept, buffers=bucket, temporaries=whole), key=_total)
    master = width * states.stepped
    copied = Ledger(parameters=kept, optimizer=master, temporaries=width * min(states.stepped, buckets.sub_group))
    hooked = Ledger(
        parameters=kept,
        gradients=recipe.gradient * states.stepped,
        optimizer=master,
        buffers=bucket,
        temporaries=whole,
    )
    return max(splitting, copied, hooked, key=_total)


def largest_matrix(job: Job) -> int:
    """Elements of the largest weight."""
    largest = max((block.largest_matrix for block in job.counts.blocks), default=0)
    return max(largest, job.facts.vocab_size * job.facts.hidden_size)


def _total(ledger: Ledger) -> float:
    return ledger.total


# Memory of saving a checkpoint, beside weights and optimizer states.


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Bytes beside the resident states: `device` on one device; `host_of_rank_0` and `host_of_others` in a process."""

    device: Ledger
    host_of_rank_0: float
    host_of_others: float


def saving_of(job: Job, recipe: Recipe, states: States) -> Saving:
    """Return what a checkpoint of the workload's kind takes; nothing where none was asked for."""
    matrix = largest_matrix(job)
    if job.workload.save == "none":
        return Saving(device=Ledger(), host_of_rank_0=0, host_of_others=0)
    if job.workload.save == "sharded":
        # One tensor at a time; ZeRO's optimizer states are one flat tensor of the partition.
        size = 4.0 * states.stepped if job.configuration.zero_stage else 4.0 * matrix / job.configuration.state_shards
        weights = recipe.weight * states.elements if job.configuration.zero_stage in (1, 2) else 0.0
        return Saving(device=Ledger(), host_of_rank_0=max(size, weights), host_of_others=size)
    return Saving(
        device=Ledger(temporaries=recipe.weight * _unsharded(job) * matrix),
        host_of_rank_0=recipe.weight * job.counts.total,
        host_of_others=0,
    )


def _unsharded(job: Job) -> int:
    """Whole tensors on every rank's device at once: DTensor copies what it all-gathered (measured on ranks)."""
    if job.configuration.strategy in FSDP_STRATEGIES:
        return 2
    return 1 if job.configuration.zero_stage == 3 else 0
