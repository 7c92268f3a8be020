"""States of one rank, by the ZeRO arithmetic and to the byte.

They are parameters, gradients, optimizer states, and what a step makes beside them.

With Psi parameters, N shards and K bytes of optimizer state (master copy included): a replica costs 4 Psi + K Psi,
ZeRO-1 4 Psi + K Psi/N, ZeRO-2 2 Psi + (2 + K) Psi/N, ZeRO-3 and FSDP (4 + K) Psi/N in 16-bit training (Rajbhandari et
al. 2020, figure 1); the 2s become 4s where weights and gradients are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

from planner.cost.memo import memo_by_fields
from planner.cost.memory.ledger import States
from planner.cost.memory.reference import reference_states
from planner.cost.memory.units import (
    ALLOCATION_BYTES,
    Units,
    mean_width,
    round_up,
    shards_of,
    trained_shards_of,
    trained_units_of,
    units_of,
    weight_bytes,
)
from planner.cost.memory.zero.offload import native_states, swapping_buffers, zero_host_buffers
from planner.cost.memory.zero.partition import largest_share
from planner.cost.precision import Recipe
from planner.models.facts import Shape
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES, Optimizer

_by_shards = memo_by_fields(
    *("strategy", "backend", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "virtual_stages"),
    *("stage_layers", "optimizer", "offload", "offload_ratio", "accumulates"),
)

# Optimizer states between steps, tensor by tensor.


_SMALLEST_8BIT = 4096
_VALUES_PER_SCALE = 256
_SMALLEST_PAGED = 100_000
_COUNTS_STEPS = ("adamw", "adamw-fused", "adamw-forloop", "adafactor")


def optimizer_state_bytes(job: Job, recipe: Recipe, shards: Units) -> float:
    """Return device bytes of the moments, and of step counters where the kernel is fused.

    torch keeps those in host memory otherwise.
    """
    optimizer = job.configuration.optimizer
    on_device = optimizer == "adamw-fused" or (job.cluster.device.is_cpu and optimizer in _COUNTS_STEPS)
    counter, width = ALLOCATION_BYTES if on_device else 0, recipe.master or recipe.weight
    return sum(
        unit.repeats
        * sum(
            moment_bytes(optimizer, shape, width, in_block=unit is not shards.root) + counter for shape in unit.shapes
        )
        for unit in shards.every
    )


def paged_state_bytes(job: Job, shards: Units) -> float:
    """Return bytes of moments in memory that the driver moves between device and host as it needs to.

    torch's allocator does not see them: they are those of bitsandbytes' paged optimizers for tensors from 100,000
    elements (`optim/optimizer.py`, get_state_buffer).
    """
    if job.configuration.optimizer != "adamw-8bit-paged":
        return 0.0
    return sum(
        unit.repeats
        * sum(_blockwise(size, *_BLOCKWISE["adamw-8bit"]) for size in unit.sizes if size >= _SMALLEST_PAGED)
        for unit in shards.every
    )


_BLOCKWISE: dict[Optimizer, tuple[float, int]] = {
    "adamw-8bit": (1.0, _VALUES_PER_SCALE),
    "adamw-8bit-paged": (1.0, _VALUES_PER_SCALE),
    "adamw-4bit": (0.5, 128),
    "adamw-fp8": (1.0, 256),
}
"""Bytes of a value of a moment, and values that share an fp32 scale."""


def _blockwise(size: int, width: float, block: int) -> int:
    return 2 * (round_up(size * width) + round_up(4 * -(-size // block)))


def moment_bytes(optimizer: Optimizer, shape: Shape, width: int, *, in_block: bool = True) -> int:
    """Return bytes of one tensor's moments.

    `width` is that of its gradient, whose dtype torch's optimizers follow. Muon steps the matrices of blocks
    (`in_block`) and leaves the rest to AdamW.
    """
    size = prod(shape)
    if optimizer in _BLOCKWISE:
        value, block = _BLOCKWISE[optimizer]
        of_bitsandbytes = optimizer.startswith("adamw-8bit")
        if size < _SMALLEST_8BIT or (not of_bitsandbytes and size % block):
            return 2 * round_up((4 if of_bitsandbytes else width) * size)
        if optimizer == "adamw-8bit-paged" and size >= _SMALLEST_PAGED:
            return 0
        return _blockwise(size, value, block)
    if optimizer.startswith("adamw"):
        return 2 * round_up(size * width)
    if optimizer == "muon":
        return round_up(size * width) * (1 if in_block and len(shape) == 2 else 2)
    if optimizer == "adafactor":
        if len(shape) < 2:
            return round_up(size * width)
        rows, columns = size // shape[-1], size // shape[-2]
        return round_up(rows * width) + round_up(columns * width)
    return round_up(size * width) if optimizer == "lion" else 0


@_by_shards
def states_of(job: Job, recipe: Recipe) -> States:
    """Resident states of the busiest rank as the allocator gives them."""
    states = _by_arithmetic(job, recipe) if job.configuration.zero_stage else _of_tensors(job, recipe)
    return _with_copies(job, recipe, _offloaded(job, recipe, states))


@_by_shards
def nominal_states_of(job: Job, recipe: Recipe) -> States:
    """Resident states by the ZeRO arithmetic, without the allocator's rounding and FSDP2's padding."""
    return _with_copies(job, recipe, _offloaded(job, recipe, _by_arithmetic(job, recipe)))


def _with_copies(job: Job, recipe: Recipe, states: States) -> States:
    """Return the states with the copies of the weights that a workload keeps on the device, sharded where weights are.

    These are an average of what is trained, in the dtype that is stepped (`torch.optim.swa_utils.AveragedModel`), and
    a reference model of its own (`planner.cost.memory.reference`).
    """
    workload, configuration = job.workload, job.configuration
    if not (workload.ema or job.has_reference):
        return states
    is_cut = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage == 3
    copies = 0.0
    if workload.ema:
        units = trained_shards_of(job) if is_cut else trained_units_of(job)
        copies += units.bytes(recipe.master or recipe.weight)
    copies += reference_states(job, recipe)
    return replace(states, parameters=states.parameters + copies)


ROUNDING = 0.05
"""More than this share above the arithmetic is no rounding of an allocator."""


def is_uneven(states: States, even: States) -> bool:
    """Return whether the busiest rank's states are clearly more than the arithmetic's.

    FSDP2 shards the first dimension of each weight, and cannot spread what has fewer rows than there are ranks.
    """
    return states.on_device > (1 + ROUNDING) * even.on_device


def _by_arithmetic(job: Job, recipe: Recipe) -> States:
    """Return states sharded as one flat partition, as DeepSpeed makes it; nothing is offloaded."""
    configuration = job.configuration
    units, trains = units_of(job), trained_units_of(job)
    elements, trained = units.elements, trains.elements
    share = largest_share(job)
    local, stepped = _sharded_elements(job, units, share), _sharded_elements(job, trains, share)
    shards_weights = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage == 3
    shards_gradients = shards_weights or configuration.zero_stage == 2
    return States(
        parameters=mean_width(job, recipe) * (local if shards_weights else elements),
        gradients=recipe.gradient * (stepped if shards_gradients else trained),
        optimizer=(recipe.master + _moments_per_parameter(job, recipe)) * stepped,
        host=0,
        nvme=0,
        elements=elements,
        local=local,
        stepped=stepped,
    )


def _sharded_elements(job: Job, units: Units, share: float) -> float:
    """Elements of a rank's shards, `share` of what is not spread over expert-parallel ranks."""
    chosen = job.configuration
    if chosen.expert_shards == chosen.state_shards:
        return units.elements * share
    return (units.elements - units.experts) * share + units.experts / chosen.expert_shards


def _moments_per_parameter(job: Job, recipe: Recipe) -> float:
    """Return bytes of moments per parameter.

    Adafactor's are sums over the rows and columns of matrices; DeepSpeed's flat partition has none, so that it keeps a
    whole fp32 moment there. Muon's and what is not paged depend on the tensor too.
    """
    optimizer = job.configuration.optimizer
    if optimizer not in ("adafactor", "muon", "adamw-8bit-paged"):
        return recipe.state
    if job.configuration.backend == "deepspeed" and optimizer == "adafactor":
        return 4.0
    units = trained_units_of(job)
    return optimizer_state_bytes(job, recipe, units) / max(units.elements, 1)


def _of_tensors(job: Job, recipe: Recipe) -> States:
    """Return the states under torch's strategies, where every parameter and moment is a tensor of its own.

    FSDP2 reduces a unit's gradients into one.
    """
    units, shards, trained = units_of(job), shards_of(job), trained_shards_of(job)
    is_fsdp = job.configuration.strategy in FSDP_STRATEGIES
    return States(
        parameters=weight_bytes(job, recipe, sharded=True),
        gradients=trained.flat_bytes(recipe.gradient) if is_fsdp else trained.bytes(recipe.gradient),
        optimizer=optimizer_state_bytes(job, recipe, trained) + trained.bytes(recipe.master),
        host=0,
        nvme=0,
        elements=units.elements,
        local=shards.elements,
        stepped=trained.elements,
    )


def _offloaded(job: Job, recipe: Recipe, states: States) -> States:
    """Move what the plan offloads from the device to the host or to NVMe.

    ZeRO's gradients have left the device when backward ends (`zero_offload.py`). FSDP2's CPU offload moves shards,
    gradients and states together.
    """
    offload = job.configuration.offload
    if offload == "none":
        return states
    if job.configuration.backend == "native":
        return native_states(job, recipe, states)
    if job.configuration.strategy in FSDP_STRATEGIES:
        host = states.parameters + states.gradients + states.optimizer
        return replace(states, parameters=0, gradients=0, optimizer=0, host=host)
    host = zero_host_buffers(job, recipe, states.optimizer / max(states.stepped, 1) - recipe.master).total
    moved = replace(states, gradients=0, optimizer=0, host=host)
    if offload == "optimizer":
        return moved
    if offload == "all":
        return replace(moved, parameters=0)
    swapping = swapping_buffers(job, recipe).total
    return replace(moved, parameters=0, host=swapping, nvme=host + states.parameters)


# What the optimizer's step makes on the device besides its states.


def step_temporaries(job: Job, recipe: Recipe, states: States) -> float:
    """Temporaries of the optimizer on the device; none where the step runs in host memory."""
    if job.configuration.offload != "none":
        return 0.0
    if job.configuration.zero_stage:
        cast = 4 * states.stepped if recipe.gradient < recipe.master else 0.0
        return cast + flat_step_temporaries(job, states.stepped, recipe.master or recipe.weight)
    return tensor_step_temporaries(job, trained_shards_of(job), recipe.weight)


def flat_step_temporaries(job: Job, elements: float, width: int) -> int:
    """Return a step's temporaries where one flat tensor is stepped, as by DeepSpeed; Adafactor clones such."""
    copies = {"adamw": 2 if job.cluster.device.is_cpu else 1, "adamw-forloop": 2, "adafactor": 2, "lion": 2}
    return copies.get(job.configuration.optimizer, 0) * round_up(elements * width)


def tensor_step_temporaries(job: Job, shards: Units, width: int) -> float:
    """Temporaries over tensors of `width` bytes per element, as torch 2.13's optimizers make them.

    AdamW's foreach form, torch's default on a GPU, takes the square roots of all second moments at once
    (`_foreach_sqrt`). A loop holds what it works with and what is left of the tensor before: in AdamW the root and
    its quotient beside the last quotient, in Adafactor the update beside the last one. Lion's clone and its sum end
    with each tensor. SGD without momentum, fused and 8-bit AdamW work in place.
    """
    optimizer = job.configuration.optimizer
    if optimizer == "adamw" and not job.cluster.device.is_cpu:
        return shards.bytes(width)
    if optimizer in ("adamw", "adamw-forloop"):
        return max(2 * tensor + before for before, tensor in _neighbours(shards, width))
    if optimizer == "adafactor":
        return max(tensor + before for before, tensor in _neighbours(shards, width))
    if optimizer == "lion":
        return max(2 * tensor for _, tensor in _neighbours(shards, width))
    return _muon_temporaries(job, shards, width) if optimizer == "muon" else 0.0


def _muon_temporaries(job: Job, shards: Units, width: int) -> float:
    """Return the temporaries of Muon's update of one matrix of a block, whole on whatever rank steps it.

    The update lies beside two 16-bit copies and two products of its smaller side (torch 2.13 `optim/_muon.py`,
    _zeropower_via_newtonschulz). AdamW's roots over what is outside the blocks are made at another moment.
    """
    matrices = [shape for unit in trained_units_of(job).blocks for shape in unit.shapes if len(shape) == 2]
    newton_schulz = max((round_up(prod(shape) * (width + 4)) + 4 * min(shape) ** 2 for shape in matrices), default=0)
    outside = shards.root.bytes(width) + sum(
        unit.repeats * sum(round_up(prod(shape) * width) for shape in unit.shapes if len(shape) != 2)
        for unit in shards.blocks
    )
    return max(float(newton_schulz), outside)


def _neighbours(shards: Units, width: int) -> Iterator[tuple[int, int]]:
    """Bytes of each tensor after those of the one before it, in the order a loop takes them; a block comes twice."""
    sizes = [0, *shards.embedding, *(size for block in shards.blocks for size in 2 * block.sizes), *shards.ending]
    return pairwise(round_up(size * width) for size in sizes)
