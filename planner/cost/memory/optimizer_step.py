"""What the optimizer's step makes on the device besides its states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from planner.cost.memory.ledger import States
from planner.cost.memory.units import Units, rounded, trained_shards_of
from planner.cost.precision import Recipe
from planner.types.job import Job


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
