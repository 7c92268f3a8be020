"""Holding: what a strategy holds beside weights, optimizer states and activations, at every moment of a step.

Each family of strategies has its file: `replica` (single, DDP), `fsdp`, `zero` and `zero3`; `optimizer_step` is for all
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.job import Job
from planner.memory.fsdp import fsdp_after_backward, fsdp_at, fsdp_before_blocks
from planner.memory.instants import Instant
from planner.memory.ledger import Ledger
from planner.memory.optimizer_step import step_temporaries
from planner.memory.recipe import Recipe
from planner.memory.replica import replica_at, replica_resident
from planner.memory.states import States
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
    if job.configuration.zero_stage:
        return zero_holding(job, recipe)
    if job.configuration.strategy in FSDP_STRATEGIES:
        return _Sharded(job, recipe, states)
    return _Replica(job, recipe, states)


@dataclass(frozen=True, slots=True)
class _Replica:
    _job: Job
    _recipe: Recipe
    _states: States

    def at(self, instant: Instant) -> Ledger:
        return replica_resident(self._job, self._recipe) + replica_at(self._job, self._recipe, instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        step = replica_resident(self._job, self._recipe) + _step(self._job, self._recipe, self._states)
        return (("step", step),)


@dataclass(frozen=True, slots=True)
class _Sharded:
    _job: Job
    _recipe: Recipe
    _states: States

    def at(self, instant: Instant) -> Ledger:
        return fsdp_at(self._job, self._recipe, instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        return (
            ("forward", fsdp_before_blocks(self._job, self._recipe)),
            ("backward", fsdp_after_backward(self._job, self._recipe)),
            ("step", _step(self._job, self._recipe, self._states)),
        )


def _step(job: Job, recipe: Recipe, states: States) -> Ledger:
    return Ledger(gradients=states.gradients, temporaries=step_temporaries(job, recipe, states))
