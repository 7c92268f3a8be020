"""What DeepSpeed's ZeRO keeps in host memory where it offloads, on one rank, buffer by buffer.

Sources: DeepSpeed 0.19's `runtime/zero/stage_1_and_2.py`, `stage3.py`, `swap_tensor/`, and `ops/adam/cpu_adam.py`,
which makes its moments where the weights are and does not pin them.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.zero_partition import flat_partition, tensor_partitions
from planner.zero_buckets import zero_buckets

SWAP_BUFFERS = {"optimizer": 4, "parameters": 5}
SWAP_BUFFER_ELEMENTS = 100_000_000
"""Of the NVMe configs that `planner/emit/deepspeed.py` writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBuffers:
    """Bytes of each pinned buffer before any rounding, and of all that is not pinned."""

    pinned: tuple[float, ...]
    other: float

    @property
    def total(self) -> float:
        return sum(self.pinned) + self.other


def zero_host_buffers(job: Job, recipe: Recipe, moments_per_parameter: float) -> HostBuffers:
    """Master weights, their gradients and moments, and the buffers that weights and gradients pass through."""
    if job.configuration.zero_stage == 3:
        return _by_tensor(job, recipe, moments_per_parameter)
    flat = flat_partition(job)
    # Stage 2 adds gradients up on the host, stage 1 unreduced on the device.
    adds_up = job.configuration.zero_stage == 2 and job.configuration.gradient_accumulation_steps > 1
    master = float(recipe.master * flat.size)
    accumulated = (recipe.gradient * float(flat.touched),) if adds_up else ()
    return HostBuffers(
        pinned=(master, master, recipe.weight * float(flat.size), recipe.gradient * float(flat.largest), *accumulated),
        other=moments_per_parameter * flat.size,
    )


def _by_tensor(job: Job, recipe: Recipe, moments_per_parameter: float) -> HostBuffers:
    """Stage 3: gradients of each sub-group in the master's dtype and all of them in their own; `all` adds weights."""
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    local = tensor_partitions(job, buckets.persistence_threshold).local
    groups = -(-local // buckets.sub_group)
    weights = (float(recipe.weight * local),) if job.configuration.offload == "all" else ()
    return HostBuffers(
        pinned=(recipe.gradient * float(local), *weights, *[recipe.master * local / groups] * groups),
        other=(recipe.master + moments_per_parameter) * local,
    )


def swapping_buffers(job: Job, recipe: Recipe) -> HostBuffers:
    """Stage 3 with NVMe: page-locked buffers for a sub-group's states and for some parameters, and what `max_in_cpu`
    leaves in host memory."""
    buckets = zero_buckets(3, parameters=job.counts.total, hidden_size=job.facts.hidden_size)
    local = tensor_partitions(job, buckets.persistence_threshold).local
    group = min(local, buckets.sub_group)
    table = job.facts.vocab_size * job.facts.hidden_size / job.configuration.dims.data_parallel
    parameters = SWAP_BUFFERS["parameters"] * recipe.weight * max(SWAP_BUFFER_ELEMENTS, table)
    # `aio` locks its buffers in exact size.
    return HostBuffers(
        pinned=(recipe.gradient * float(local), recipe.weight * float(group)),
        other=SWAP_BUFFERS["optimizer"] * recipe.master * group + parameters,
    )
