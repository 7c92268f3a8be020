"""The reference of preferences and of reinforcement learning: a second model, or the trained one without adapters.

TRL 1.16 loads it in fp32 or as it is told, as the trained one, and never freezes it (`trainer/utils.py`,
create_model_from_path). DeepSpeed's engine casts it, and stage 3 shards it (`models/utils.py`, prepare_deepspeed);
accelerate's FSDP2 shards it as one unit (prepare_fsdp calls `fully_shard` on the whole of it), so that its forward has
all of its weights at once, with the buffer that they came in. Elsewhere each rank has it whole, under autocast where
training has mixed precision (`Accelerator.prepare_model`); our own ZeRO, which casts the trained model, leaves it so.
"""

from __future__ import annotations

from planner.cost.memory.units import Shards, Units, round_up, shards_of, shards_over, units_of
from planner.cost.precision import LOADED_BYTES, Recipe
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

_LOADED = 4
"""Bytes of a weight as TRL loads it where it is not told otherwise."""


def has_own_reference(job: Job) -> bool:
    """Return whether a reference is a model of its own: adapters are switched off for it instead."""
    adapts = job.workload.method != "full" or not (job.counts.trains_all or job.workload.train_only)
    return job.has_reference and not adapts


def is_one_unit(job: Job) -> bool:
    """Return whether the reference is one unit of accelerate's FSDP2, as TRL's own trainers have it.

    They are told by their loss: trainers with whole logits (NeMo-RL, verl, LLaMA-Factory) shard it by blocks, as the
    trained one, or swap its weights in.
    """
    by_accelerate = job.workload.code == "transformers" and not job.cluster.device.is_cpu
    by_accelerate = by_accelerate and job.workload.loss != "plain"
    return by_accelerate and job.configuration.strategy in FSDP_STRATEGIES and has_own_reference(job)


def reference_width(job: Job, recipe: Recipe) -> float:
    """Return the bytes of a weight of the reference as it rests."""
    if job.workload.load_dtype is not None:
        return LOADED_BYTES[job.workload.load_dtype]
    casts = job.configuration.backend == "native" and job.configuration.precision in ("bf16", "fp16")
    return max(recipe.weight, _LOADED) if casts else recipe.weight


def reference_casts(job: Job, recipe: Recipe) -> float:
    """Return the bytes of autocast's copies of a reference's blocks, kept to the end of its forward.

    They are of one that stays as it was loaded beside our own ZeRO, which casts the trained model instead; 0 elsewhere.
    """
    is_cast = job.configuration.backend == "native" and reference_width(job, recipe) > recipe.compute
    return recipe.compute * job.counts.in_blocks if is_cast and has_own_reference(job) else 0.0


def reference_states(job: Job, recipe: Recipe) -> float:
    """Return the bytes of the reference between forwards."""
    if not has_own_reference(job):
        return 0.0
    is_cut = job.configuration.strategy in FSDP_STRATEGIES or job.configuration.zero_stage == 3
    is_whole = job.configuration.backend == "native" or job.cluster.device.is_cpu
    return (shards_of(job) if is_cut and not is_whole else units_of(job)).bytes(reference_width(job, recipe))


def unsharded_reference(units: Units, recipe: Recipe, shards: Shards) -> tuple[float, float]:
    """Return the bytes of a reference's weights as one whole unit of FSDP2, and of the buffer they came in."""
    whole = sum(unit.repeats * sum(round_up(size * recipe.gather) for size in unit.sizes) for unit in units.every)
    return whole, 0.0 if shards.dense == 1 else whole


def unsharded_reference_of(job: Job, recipe: Recipe) -> float:
    """Return what a forward of the reference has whole of its weights, buffers included; nothing where they rest so."""
    return sum(unsharded_reference(units_of(job), recipe, shards_over(job))) if is_one_unit(job) else 0.0


def block_token_bytes(job: Job, recipe: Recipe) -> float:
    """Return what a decoder block's forward works with for a token, of a rank's share, when nothing is kept.

    That is its input and norm, and the attention's tensors or the MLP's.
    """
    facts, chosen = job.facts, job.configuration
    attention = 2 * facts.head_dim * (facts.num_heads + facts.num_kv_heads)
    scores = facts.num_heads * chosen.sequence_length * (4 + recipe.compute) if job.eager_attention else 0
    width = facts.moe_intermediate_size or facts.intermediate_size
    copies = (5 if facts.composite_activation else 2) + facts.gated_mlp
    mlp = copies * width * max(facts.experts_per_token, 1)
    stream = facts.hidden_size * (2 * recipe.residual + 4)
    return (stream + max(recipe.compute * attention + scores, recipe.compute * mlp)) / (chosen.tp * chosen.cp)
