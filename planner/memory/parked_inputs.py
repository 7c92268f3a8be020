"""What checkpointing starts again from, where it waits in host memory: one input of each block."""

from __future__ import annotations

from planner.job import Job
from planner.memory.amount import bytes_at
from planner.memory.figures import figures_of
from planner.memory.recipe import Recipe


def parked_inputs(job: Job, recipe: Recipe) -> list[tuple[int, float]]:
    """How many blocks there are of each kind, and the bytes of one's input; nothing where inputs stay on the device, or
    the device's memory is the host's."""
    configuration = job.configuration
    if not configuration.activations_on_host or job.cluster.device.is_cpu:
        return []
    blocks = figures_of(job, recipe).blocks
    return [(block.count, bytes_at(block.boundary, configuration.micro_batch_size)) for block in blocks]
