"""Communication of tensor and pipeline parallelism in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.timing.communication import collective_seconds, group, neighbour_seconds
from planner.timing.efficiency import DeviceRates
from planner.timing.layout import Layout

REDUCTIONS_EACH_WAY = 2
"""All-reduces of a block's forward, and of its backward: one for attention, one for the MLP (Megatron-LM, arXiv
1909.08053). Sequence parallelism puts an all-gather and a reduce-scatter in the place of each: the same bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """Seconds of all-reduces in the forward and in the backward of one micro-batch on one rank; nothing hides them."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


def tensor_parallel(job: Job, where: Layout, rates: DeviceRates) -> TensorParallel:
    """All-reduces of activations over the tp ranks. Full recomputation repeats the forward's."""
    configuration = job.configuration
    if configuration.tp == 1:
        return TensorParallel()
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes
    one = collective_seconds(job.cluster, "all_reduce", size, group(job.cluster, configuration.tp, 1))
    each_way = where.layers * REDUCTIONS_EACH_WAY
    repeated = 0
    if configuration.activation_checkpointing == "full":
        # What comes out of the MLP is not needed again.
        repeated = each_way // 2 if rates.code.stops_early else each_way
    # One more each way: for the embedding's output, and for the gradient that leaves the head.
    return TensorParallel(forward=(each_way + 1) * one, backward=(each_way + repeated + 1) * one)


def boundary_seconds(job: Job, rates: DeviceRates) -> float:
    """One activation sent from a pipeline stage to the next, each tp rank sending its slice of the tokens."""
    configuration = job.configuration
    if configuration.pp == 1:
        return 0.0
    size = job.tokens_per_micro_batch * job.facts.hidden_size * rates.element_bytes / configuration.tp
    return neighbour_seconds(job.cluster, size, configuration.world_size // configuration.pp)
