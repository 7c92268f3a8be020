"""What the optimizer's step makes on the device besides its states."""

from __future__ import annotations

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.states import States


def step_temporaries(job: Job, recipe: Recipe, states: States) -> float:
    """Temporaries of the optimizer on the device.

    foreach AdamW (torch's default on a GPU) copies its second moments once, for-loop AdamW works one tensor at a time,
    fused AdamW in place. ZeRO first makes an fp32 copy of its 16-bit gradient partition.
    """
    configuration = job.configuration
    if configuration.offload != "none":
        return 0.0
    largest = max((block.largest_matrix for block in job.counts.blocks), default=0)
    matrix = max(largest, job.facts.vocab_size * job.facts.hidden_size) / configuration.tp
    state_width = 2 if configuration.precision == "bf16-pure" else 4
    fp32_gradient = 4 * states.local if configuration.zero_stage and recipe.gradient == 2 and recipe.master else 0.0
    return fp32_gradient + _optimizer_temporaries(job, states.local, matrix / configuration.dp_shard) * state_width


def _optimizer_temporaries(job: Job, local: float, largest: float) -> float:
    """Elements of optimizer temporaries."""
    optimizer = job.configuration.optimizer
    if optimizer in ("adamw-fused", "adamw-8bit", "sgd"):
        return 0.0
    for_loop = optimizer != "adamw" or job.cluster.device.is_cpu
    flat = job.configuration.zero_stage > 0  # DeepSpeed's partition is one flat tensor
    if for_loop and not flat:
        return 2 * largest
    return local * (2 if for_loop else 1)
