"""What DeepSpeed's ZeRO holds besides states and activations: reduction buckets and gathered parameters.

Source: DeepSpeed 0.19's `stage_1_and_2.py` and `stage3.py`; bucket sizes come from `planner.zero_buckets`.
"""

from __future__ import annotations

from planner.job import Job
from planner.memory.ledger import Transients
from planner.memory.recipe import Recipe
from planner.memory.states import States
from planner.zero_buckets import zero_buckets


def zero_transients(job: Job, recipe: Recipe, states: States, step: float) -> Transients:
    """Reduction buckets; in stage 3 also the parameters that DeepSpeed keeps gathered."""
    counts, stage = job.counts, job.configuration.zero_stage
    buckets = zero_buckets(stage, parameters=counts.total, hidden_size=job.facts.hidden_size)
    reducing = recipe.gradient * buckets.reduce * (2 if buckets.overlap_comm else 1)
    if stage < 3:
        return Transients(backward=reducing, step=step)
    live = recipe.weight * min(states.elements, max(buckets.max_live, counts.largest_block))
    block = recipe.gradient * counts.largest_block
    return Transients(forward=live, backward=live + reducing + block, step=step)
