"""How long a pipeline takes: its schedule, run through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.timing.collectives import collective_seconds, group, neighbour_seconds
from planner.cost.timing.compute import NOTHING, Passes, block_passes, head_passes
from planner.cost.timing.efficiency import DeviceRates
from planner.cost.timing.flops import executed_layers, geometry, job_stacks
from planner.cost.timing.layout import Layout
from planner.types.job import Job

# Communication of tensor and pipeline parallelism in one micro-batch.


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


# The compute of one micro-batch, cut into the stages of a pipeline.


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """`layers` average blocks on one rank, and the head where the stage ends in it."""

    layers: int
    block: Passes
    head: Passes = NOTHING

    @property
    def forward(self) -> float:
        return self.layers * self.block.forward + self.head.forward

    @property
    def backward(self) -> float:
        """With what is recomputed for it."""
        return self.layers * (self.block.backward + self.block.recomputed) + self.head.backward

    @property
    def total(self) -> float:
        return self.forward + self.backward


def stages(job: Job, rates: DeviceRates) -> tuple[Stage, ...]:
    """One stage per pipeline rank: layers as even as they go, the first ones getting what is left over."""
    shape = geometry(job)
    blocks = NOTHING
    for stack in job_stacks(job):
        blocks = blocks + block_passes(stack, job, shape, rates) * stack.layers
    layers, pp = executed_layers(job), job.configuration.pp
    block, head = blocks * (1 / layers), head_passes(job, shape, rates)
    if pp == 1:
        return (Stage(layers=layers, block=block, head=head),)
    each, more = divmod(layers, pp)
    counts = [each + (index < more) for index in range(pp)]
    return (
        *(Stage(layers=count, block=block) for count in counts[:-1]),
        Stage(layers=counts[-1], block=block, head=head),
    )


SETTLED, AT_LEAST = 3, 24
"""Micro-batches per stage, and of any pipeline, after which each further one takes as long as the last."""


def one_forward_one_backward(
    forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float = 0.0
) -> float:
    """Seconds from the first forward to the last backward under 1F1B (arXiv 2104.04473, section 2.2).

    Stage s of p starts with p - s forwards, then takes a backward and a forward in turn, and ends with the backwards
    that are left. A stage waits for its neighbour's result and `hop` seconds for its way. Once the schedule has
    settled the rest is the schedule's period times their number.
    """
    simulated = min(micro_batches, max(AT_LEAST, SETTLED * len(forwards)))
    seconds = _simulated(forwards, backwards, simulated, hop)
    if simulated < micro_batches:
        seconds += (micro_batches - simulated) * _period(forwards, backwards, hop)
    return seconds


def _simulated(forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float) -> float:
    """Wave i holds forward i of every stage, and the backward that goes before it there.

    Backward i - (p - s) of stage s needs the next stage's, which the wave before held; so two rows of times do for the
    whole schedule.
    """
    stages = len(forwards)
    free = [0.0] * stages
    # Behind the last stage there is none, whose gradient is always there.
    arrived = [-hop] * (stages + 1)
    for wave in range(micro_batches + stages):
        # Stage s takes its backward number wave - stages + s, as far as there is one.
        for stage in range(max(0, stages - wave), min(stages, micro_batches + stages - wave)):
            ready, returned = free[stage], arrived[stage + 1] + hop
            free[stage] = arrived[stage] = (ready if ready > returned else returned) + backwards[stage]
        if wave < micro_batches:
            sent = 0.0
            for stage, forward in enumerate(forwards):
                ready = free[stage]
                free[stage] = done = (ready if ready > sent else sent) + forward
                sent = done + hop
    return max(free)


def _period(forwards: Sequence[float], backwards: Sequence[float], hop: float) -> float:
    """Seconds per micro-batch once the pipeline runs evenly: the slowest round trip over neighbouring stages.

    A trip over n stages and back holds n micro-batches at a time, and crosses 2 (n - 1) times to a neighbour.
    """
    both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    slowest = max(both)
    if not hop:
        return slowest
    for first in range(len(both)):
        trip = 0.0
        for count, stage in enumerate(both[first:], start=1):
            trip += stage
            slowest = max(slowest, (trip + 2 * hop * (count - 1)) / count)
    return slowest
