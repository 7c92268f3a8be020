"""What the optimizer's step makes on the device besides its states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.states import States
from planner.memory.units import Units, rounded, shards_of


def step_temporaries(job: Job, recipe: Recipe, states: States) -> float:
    """Temporaries of the optimizer on the device; none where the step runs in host memory."""
    if job.configuration.offload != "none":
        return 0.0
    if job.configuration.zero_stage:
        return _flat_step(job, recipe, states)
    shards = shards_of(job)
    return _tensor_step(job, shards, recipe.weight)


def _tensor_step(job: Job, shards: Units, width: int) -> float:
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


def _flat_step(job: Job, recipe: Recipe, states: States) -> float:
    """DeepSpeed's optimizers work on one flat partition; ZeRO first makes an fp32 copy of its 16-bit gradients."""
    optimizer = job.configuration.optimizer
    state_width = 2 if job.configuration.precision == "bf16-pure" else 4
    fp32_gradient = 4 * states.local if recipe.gradient == 2 and recipe.master else 0.0
    if optimizer in ("adamw-fused", "adamw-8bit", "sgd"):
        return fp32_gradient
    for_loop = optimizer != "adamw" or job.cluster.device.is_cpu
    return fp32_gradient + states.local * (2 if for_loop else 1) * state_width
