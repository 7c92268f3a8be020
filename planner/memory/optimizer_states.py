"""What an optimizer keeps between steps, tensor by tensor.

Sources: torch 2.13's `optim/adam.py` and `optim/_adafactor.py` (where scalars and factored moments live), bitsandbytes'
`optim/optimizer.py` (tensors under 4096 elements keep fp32 moments; else 8 bits and one fp32 scale per 256 values).
"""

from __future__ import annotations

from math import prod

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.units import ALLOCATION_BYTES, Units, rounded
from planner.models.parameter_counts import Shape
from planner.vocabulary import Optimizer

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
