"""The compute of one micro-batch, cut into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.timing.compute import NOTHING, Passes, block_passes, head_passes
from planner.timing.efficiency import DeviceRates
from planner.timing.flops import executed_layers, geometry, job_stacks


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
