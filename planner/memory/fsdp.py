"""What FSDP2 holds besides states and activations: gathered units and reduction buffers.

Source: torch's `distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.ledger import Transients
from planner.memory.recipe import Recipe
from planner.memory.states import States


def fsdp_transients(job: Job, recipe: Recipe, states: States, step: float) -> Transients:
    """Current and prefetched block gathered, the root unit throughout; in backward the block's gradients and their
    fp32 copy."""
    counts, configuration = job.counts, job.configuration
    block = counts.largest_block / configuration.tp
    root = min(counts.outside_blocks / configuration.tp, states.elements)
    layers = sum(item.repeats for item in counts.blocks)
    units = block * min(2, layers)
    gathered = recipe.gather * (root + units)
    if configuration.strategy == "fsdp-grad-op":
        gathered = recipe.gather * (states.elements + (block if layers > 1 else 0))
    reducing = (recipe.gather + recipe.reduce) * block
    accumulated = 0.0
    if configuration.gradient_accumulation_steps > 1 and not configuration.sync_each_micro_batch:
        accumulated = recipe.reduce * states.elements
    return Transients(forward=gathered, backward=gathered + reducing, accumulated=accumulated, step=step)
