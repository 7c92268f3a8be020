"""What DeepSpeed's ZeRO keeps in host memory where it offloads, on one rank, before any rounding of pinned memory.

Sources: DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py` and `stage3.py`.
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.zero_partition import flat_partition, tensor_partitions
from planner.zero_buckets import zero_buckets


def zero_host_tensors(job: Job, recipe: Recipe, moments_per_parameter: float) -> float:
    """Bytes of master weights, their gradients and moments, and of the buffers that weights and gradients pass
    through."""
    configuration = job.configuration
    optimized = 2 * recipe.master + moments_per_parameter
    if configuration.zero_stage == 3:
        buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
        local = tensor_partitions(job, buckets.persistence_threshold).local
        weights = recipe.weight if configuration.offload == "all" else 0
        return (optimized + recipe.gradient + weights) * local
    flat = flat_partition(job)
    # Stage 2 adds gradients up on the host, stage 1 unreduced on the device.
    adds_up = configuration.zero_stage == 2 and configuration.gradient_accumulation_steps > 1
    accumulated = flat.touched if adds_up else 0
    return (optimized + recipe.weight) * flat.size + recipe.gradient * (flat.largest + accumulated)
