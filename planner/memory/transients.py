"""What a strategy holds besides states and activations: gathered parameters, reduction buffers, cast copies.

Sources: the table of docs/cost-model.md, and the code of torch's `fsdp/_fully_shard`, `DistributedDataParallel`'s
reducer and DeepSpeed 0.19's `stage_1_and_2.py` and `stage3.py`; bucket sizes come from `planner.zero_buckets`.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.states import States
from planner.vocabulary import FSDP_STRATEGIES
from planner.zero_buckets import zero_buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class Transients:
    """Bytes on one rank.

    `resident` buffers live through the whole step, `forward` and `backward` in that pass only. `cast` are the 16-bit
    copies of fp32 weights that autocast keeps until their backward, `accumulated` what unsynchronised accumulation
    adds to the gradients, `step` the optimizer's temporaries.
    """

    resident: float = 0
    forward: float = 0
    backward: float = 0
    cast: float = 0
    cast_in_backward: float = 0
    accumulated: float = 0
    step: float = 0


def transients_of(job: Job, recipe: Recipe, states: States) -> Transients:
    """The transients of one strategy."""
    step = _step(job, recipe, states)
    if job.configuration.strategy in FSDP_STRATEGIES:
        return _fsdp(job, recipe, states, step)
    if job.configuration.zero_stage:
        return _zero(job, recipe, states, step)
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


def _fsdp(job: Job, recipe: Recipe, states: States, step: float) -> Transients:
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


def _zero(job: Job, recipe: Recipe, states: States, step: float) -> Transients:
    """Reduction buckets; in stage 3 also the parameters that DeepSpeed keeps gathered."""
    counts, stage = job.counts, job.configuration.zero_stage
    buckets = zero_buckets(stage, parameters=counts.total, hidden_size=job.facts.hidden_size)
    reducing = recipe.gradient * buckets.reduce * (2 if buckets.overlap_comm else 1)
    if stage < 3:
        return Transients(backward=reducing, step=step)
    live = recipe.weight * min(states.elements, max(buckets.max_live, counts.largest_block))
    block = recipe.gradient * counts.largest_block
    return Transients(forward=live, backward=live + reducing + block, step=step)


def _step(job: Job, recipe: Recipe, states: States) -> float:
    """Temporaries of the optimizer on the device.

    foreach AdamW (torch's default on a GPU) copies its second moments once, for-loop AdamW works one tensor at a time,
    fused AdamW in place. ZeRO first makes an fp32 copy of its 16-bit gradient partition.
    """
    configuration = job.configuration
    if configuration.offload != "none":
        return 0.0
    largest = max((block.largest_matrix for block in job.counts.blocks), default=0)
    matrix = max(largest, job.facts.vocab_size * job.facts.hidden_size) / configuration.tp
    state_width = 2 if configuration.precision == "bf16-pure" else 4
    fp32_gradient = 4 * states.local if configuration.zero_stage and recipe.gradient == 2 and recipe.master else 0.0
    return fp32_gradient + _optimizer_temporaries(job, states.local, matrix / configuration.dp_shard) * state_width


def _optimizer_temporaries(job: Job, local: float, largest: float) -> float:
    """Elements of optimizer temporaries."""
    optimizer = job.configuration.optimizer
    if optimizer in ("adamw-fused", "adamw-8bit", "sgd"):
        return 0.0
    for_loop = optimizer != "adamw" or job.cluster.device.is_cpu
    flat = job.configuration.zero_stage > 0  # DeepSpeed's partition is one flat tensor
    if for_loop and not flat:
        return 2 * largest
    return local * (2 if for_loop else 1)
