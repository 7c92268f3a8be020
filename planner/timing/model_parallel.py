"""Communication of tensor and pipeline parallelism in one micro-batch."""

from __future__ import annotations

from planner.job import Job
from planner.timing.communication import collective_seconds, group, neighbour_seconds
from planner.timing.efficiency import DeviceRates
from planner.timing.layout import Layout

TENSOR_PARALLEL_REDUCTIONS = 4
"""All-reduces of a block: after attention and after the MLP, forward and backward (Megatron-LM, arXiv 1909.08053)."""


def tensor_parallel_seconds(job: Job, where: Layout, rates: DeviceRates) -> float:
    """All-reduces of one micro-batch on one rank; nothing hides them. Full recomputation repeats the forward's."""
    configuration = job.configuration
    if configuration.tp == 1:
        return 0.0
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes
    members = group(job.cluster, configuration.tp, 1)
    repeated = 2 if configuration.activation_checkpointing == "full" else 0
    # Two more for the embedding's output and the gradient that enters the head.
    count = where.layers * (TENSOR_PARALLEL_REDUCTIONS + repeated) + 2
    return count * collective_seconds(job.cluster, "all_reduce", size, members)


def boundary_seconds(job: Job, rates: DeviceRates) -> float:
    """One activation sent from a pipeline stage to the next, each tp rank sending its slice of the tokens."""
    configuration = job.configuration
    if configuration.pp == 1:
        return 0.0
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes / configuration.tp
    return neighbour_seconds(job.cluster, size, configuration.world_size // configuration.pp)
