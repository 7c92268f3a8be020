"""What whole replicas (`single`, `ddp`) hold besides states and activations: DDP's buckets and autocast's cast copies.

Source: torch's `DistributedDataParallel` and its reducer, and its autocast.
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.ledger import Transients
from planner.memory.recipe import Recipe
from planner.memory.states import States


def replica_transients(job: Job, recipe: Recipe, states: States, step: float) -> Transients:
    """Gradient buckets of DDP, and cast copies: all of them in forward, a block's at a time where it recomputes."""
    resident = recipe.gradient * states.elements if job.configuration.strategy == "ddp" else 0.0
    cast = cast_in_backward = 0.0
    if recipe.autocast:
        counts, tp = job.counts, job.configuration.tp
        tied = job.facts.vocab_size * job.facts.hidden_size if job.facts.tie_word_embeddings else 0
        cast = 2.0 * (states.elements - (counts.embedding + counts.other - tied) / tp)
        cast = min(max(cast, 0.0), 2.0 * states.elements)
        recomputes = job.configuration.activation_checkpointing != "none"
        cast_in_backward = 2.0 * counts.largest_block / tp if recomputes else cast
    return Transients(resident=resident, cast=cast, cast_in_backward=cast_in_backward, step=step)
