"""States of one rank, by the ZeRO arithmetic and to the byte: parameters, gradients, optimizer states, and what a step
makes beside them.

With Psi parameters, N shards and K bytes of optimizer state (master copy included): a replica costs 4 Psi + K Psi,
ZeRO-1 4 Psi + K Psi/N, ZeRO-2 2 Psi + (2 + K) Psi/N, ZeRO-3 and FSDP (4 + K) Psi/N in 16-bit training (Rajbhandari et
al. 2020, figure 1); the 2s become 4s where weights and gradients are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod

from planner.cost.memory.ledger import States
from planner.cost.memory.units import (
    ALLOCATION_BYTES,
    Units,
    rounded,
    shards_of,
    trained_shards_of,
    trained_units_of,
    units_of,
)
from planner.cost.memory.zero.offload import native_states, swapping_buffers, zero_host_buffers
from planner.cost.memory.zero.partition import largest_share
from planner.cost.precision import Recipe
from planner.models.facts import ParameterCounts, Shape
from planner.types.job import Job
from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES, Optimizer

# Optimizer states between steps, tensor by tensor.


_SMALLEST_8BIT = 4096
_VALUES_PER_SCALE = 256
_COUNTS_STEPS = ("adamw", "adamw-fused", "adamw-forloop", "adafactor")


def optimizer_state_bytes(job: Job, recipe: Recipe, shards: Units) -> float:
    """Device bytes of the moments, and of step counters where they are on the device: torch keeps them in host memory
    unless the kernel is fused."""
    optimizer = job.configuration.optimizer
    on_device = optimizer == "adamw-fused" or (job.cluster.device.is_cpu and optimizer in _COUNTS_STEPS)
    counter, width = ALLOCATION_BYTES if on_device else 0, recipe.master or recipe.weight
    return sum(
        unit.repeats * sum(moment_bytes(optimizer, shape, width) + counter for shape in unit.shapes)
        for unit in shards.every
    )


def moment_bytes(optimizer: Optimizer, shape: Shape, width: int) -> int:
    """Bytes of one tensor's moments; `width` is that of its gradient, whose dtype torch's optimizers follow."""
    size = prod(shape)
    if optimizer.startswith("adamw") and optimizer != "adamw-8bit":
        return 2 * rounded(size * width)
    if optimizer == "adamw-8bit":
        if size < _SMALLEST_8BIT:
            return 2 * rounded(4 * size)
        return 2 * (rounded(size) + rounded(4 * -(-size // _VALUES_PER_SCALE)))
    if optimizer == "adafactor":
        if len(shape) < 2:
            return rounded(size * width)
        rows, columns = size // shape[-1], size // shape[-2]
        return rounded(rows * width) + rounded(columns * width)
    return rounded(size * width) if optimizer == "lion" else 0


def elements_on_stage(counts: ParameterCounts, dims: Configuration) -> float:
    """Parameters of the largest pipeline stage on one tensor-parallel rank."""
    if dims.pp == 1:
        return counts.total / dims.tp
    layers = sum(block.repeats for block in counts.blocks) or 1
    in_stage = counts.in_blocks * -(-layers // dims.pp) / layers
    ends = max(counts.embedding, counts.head + counts.other)
    if counts.head == 0:
        ends = counts.embedding + counts.other  # a tied head needs the table on both end stages
    return (in_stage + ends) / dims.tp


def states_of(job: Job, recipe: Recipe) -> States:
    """Resident states of the busiest rank as the allocator gives them."""
    made = _by_arithmetic(job, recipe) if job.configuration.zero_stage else _of_tensors(job, recipe)
    return _offloaded(job, recipe, made)


def nominal_states_of(job: Job, recipe: Recipe) -> States:
    """Resident states by the ZeRO arithmetic, without the allocator's rounding and FSDP2's padding."""
    return _offloaded(job, recipe, _by_arithmetic(job, recipe))


ROUNDING = 0.05
"""More than this share above the arithmetic is no rounding of an allocator."""


def is_uneven(states: States, even: States) -> bool:
    """Whether the busiest rank's states are clearly more than the arithmetic's: FSDP2 shards the first dimension of
    each weight, and cannot spread what has fewer rows than there are ranks."""
    return states.on_device > (1 + ROUNDING) * even.on_device


def _by_arithmetic(job: Job, recipe: Recipe) -> States:
    """What is sharded is one flat partition, as DeepSpeed makes it; nothing is offloaded."""
    configuration = job.configuration
    elements = elements_on_stage(job.counts, configuration)
    trained = elements_on_stage(job.counts.trained, configuration)
    share = largest_share(job)
    local, stepped = elements * share, trained * share
    shards_weights = configuration.strategy in FSDP_STRATEGIES or configuration.zero_stage == 3
    shards_gradients = shards_weights or configuration.zero_stage == 2
    return States(
        parameters=recipe.weight * (local if shards_weights else elements),
        gradients=recipe.gradient * (stepped if shards_gradients else trained),
        optimizer=(recipe.master + _moments_per_parameter(job, recipe)) * stepped,
        host=0,
        nvme=0,
        elements=elements,
        local=local,
        stepped=stepped,
    )


def _moments_per_parameter(job: Job, recipe: Recipe) -> float:
    """Bytes. Adafactor's are sums over the rows and columns of matrices; DeepSpeed's flat partition has none, so that
    it keeps a whole fp32 moment there."""
    if job.configuration.optimizer != "adafactor":
        return recipe.state
    if job.configuration.backend == "deepspeed":
        return 4.0
    units = trained_units_of(job)
    return optimizer_state_bytes(job, recipe, units) / max(units.elements, 1)


def _of_tensors(job: Job, recipe: Recipe) -> States:
    """torch's strategies: every parameter and moment is a tensor; FSDP2 reduces a unit's gradients into one."""
    units, shards, trained = units_of(job), shards_of(job), trained_shards_of(job)
    is_fsdp = job.configuration.strategy in FSDP_STRATEGIES
    return States(
        parameters=shards.bytes(recipe.weight),
        gradients=trained.flat_bytes(recipe.gradient) if is_fsdp else trained.bytes(recipe.gradient),
        optimizer=optimizer_state_bytes(job, recipe, trained),
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
    return replace(moved, parameters=0, host=swapping, nvme=host + recipe.weight * states.local)


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
    """The same where one flat tensor is stepped, as DeepSpeed does; Adafactor squares and clones what has no rows."""
    copies = {"adamw": 2 if job.cluster.device.is_cpu else 1, "adamw-forloop": 2, "adafactor": 2, "lion": 2}
    return copies.get(job.configuration.optimizer, 0) * rounded(elements * width)


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
    return 0.0


def _neighbours(shards: Units, width: int) -> Iterator[tuple[int, int]]:
    """Bytes of each tensor after those of the one before it, in the order a loop takes them; a block comes twice."""
    sizes = [0, *shards.embedding, *(size for block in shards.blocks for size in 2 * block.sizes), *shards.ending]
    return pairwise(rounded(size * width) for size in sizes)
