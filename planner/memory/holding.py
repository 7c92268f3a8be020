"""Holding: what a strategy holds beside weights, optimizer states and activations, at every moment of a step.

Each family of strategies has its file: `replica` (single, DDP), `fsdp`, `zero` and `zero3`, `native` (our own ZeRO);
`optimizer_step` is for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.job import Job
from planner.memory.fsdp import FsdpHolding, fsdp_holding
from planner.memory.instants import Instant
from planner.memory.ledger import Ledger, States
from planner.memory.native import NativeHolding
from planner.memory.optimizer_step import step_temporaries
from planner.memory.recipe import Recipe
from planner.memory.replica import ReplicaHolding
from planner.memory.zero import zero_holding
from planner.vocabulary import FSDP_STRATEGIES


class Holding(Protocol):
    """Gradients, buffers and temporaries of one strategy."""

    def at(self, instant: Instant) -> Ledger:
        """At one instant of a micro-batch."""

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Moments at which hardly an activation is alive, each with the phase it belongs to."""


def holding_of(job: Job, recipe: Recipe, states: States) -> Holding:
    """The holding of the job's strategy."""
    if job.configuration.backend == "native":
        return NativeHolding(job, recipe)
    if job.configuration.zero_stage:
        return zero_holding(job, recipe)
    step = Ledger(gradients=states.gradients, temporaries=step_temporaries(job, recipe, states))
    if job.configuration.strategy in FSDP_STRATEGIES:
        return _Sharded(fsdp_holding(job, recipe), step)
    return _Replica(ReplicaHolding(job, recipe), step)


@dataclass(frozen=True, slots=True)
class _Replica:
    _held: ReplicaHolding
    _step: Ledger

    def at(self, instant: Instant) -> Ledger:
        return self._held.at(instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        return (("step", self._step + Ledger(buffers=self._held.buckets)),)


@dataclass(frozen=True, slots=True)
class _Sharded:
    _held: FsdpHolding
    _step: Ledger

    def at(self, instant: Instant) -> Ledger:
        return self._held.at(instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        return (
            ("forward", self._held.before_blocks()),
            ("backward", self._held.after_backward()),
            ("step", self._step),
        )
