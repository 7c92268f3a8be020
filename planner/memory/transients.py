"""What a strategy holds besides states and activations: gathered parameters, reduction buffers, cast copies.

Each family of strategies has its file: `replica` (single, DDP), `fsdp` and `zero`; `optimizer_step` is for all of them.
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.fsdp import fsdp_transients
from planner.memory.ledger import Transients
from planner.memory.optimizer_step import step_temporaries
from planner.memory.recipe import Recipe
from planner.memory.replica import replica_transients
from planner.memory.states import States
from planner.memory.zero import zero_transients
from planner.vocabulary import FSDP_STRATEGIES


def transients_of(job: Job, recipe: Recipe, states: States) -> Transients:
    """The transients of one strategy."""
    step = step_temporaries(job, recipe, states)
    if job.configuration.strategy in FSDP_STRATEGIES:
        return fsdp_transients(job, recipe, states, step)
    if job.configuration.zero_stage:
        return zero_transients(job, recipe, states, step)
    return replica_transients(job, recipe, states, step)
