"""What whole replicas (`single`, `ddp`) hold besides states and activations: gradients and DDP's buckets.

Source: torch 2.13's `DistributedDataParallel` with its defaults and its reducer (`csrc/distributed/c10d/reducer.cpp`):
buckets of 1 MiB, then 25 MiB, that hold a copy of every gradient, made once and kept (`gradient_as_bucket_view` off).
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.instants import Instant
from planner.memory.ledger import Ledger
from planner.memory.recipe import Recipe
from planner.memory.units import ALLOCATION_BYTES, units_of

_BUCKET_BYTES = 25 << 20


def replica_resident(job: Job, recipe: Recipe) -> Ledger:
    """DDP's buckets. Where one ends depends on the order of gradients, so that its rounding is taken at its mean."""
    if job.configuration.strategy != "ddp":
        return Ledger()
    size = recipe.gradient * units_of(job).elements
    return Ledger(buffers=size + (1 + size // _BUCKET_BYTES) * ALLOCATION_BYTES / 2)


def replica_at(job: Job, recipe: Recipe, instant: Instant) -> Ledger:
    """Gradients at one instant, and autocast's copies of weights. A micro-batch after the first adds to gradients that
    are all there, tensor by tensor."""
    units, made = units_of(job), instant.done_gradients + instant.unit_gradients
    if job.configuration.gradient_accumulation_steps == 1:
        return Ledger(gradients=recipe.gradient * made, temporaries=instant.cast)
    newest = recipe.gradient * min(instant.unit_gradients, units.largest)
    return Ledger(gradients=units.bytes(recipe.gradient) + newest, temporaries=instant.cast)
