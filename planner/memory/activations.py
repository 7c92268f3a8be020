"""Activations of one micro-batch: what all blocks keep, what the loss needs, what a block's backward works with."""

from __future__ import annotations

from dataclasses import dataclass

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.saved import Rules, Stack, block_bytes, selective_bytes, working_bytes
from planner.memory.towers import stacks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes on one device.

    `kept`: saved by all blocks, embeddings and the final norm when the forward pass ends; `working`: the largest set of
    tensors inside one block's backward, with its recomputed activations under checkpointing; `loss`: logits and the
    loss's intermediates at their largest.
    """

    kept: float
    working: float
    loss: float


def activations_of(job: Job, recipe: Recipe) -> Activations:
    """Activations of the busiest pipeline stage."""
    if job.facts.kind == "custom":
        return _custom(job, recipe)
    rules = _rules(job, recipe)
    stacks = stacks_of(job)
    checkpointing = job.configuration.activation_checkpointing
    in_flight = job.configuration.pp
    kept = sum(stack.layers * _kept_per_block(rules, stack, checkpointing) for stack in stacks) * in_flight
    kept += _around_blocks(rules, stacks[-1])
    working = max(_working_per_block(rules, stack, checkpointing) for stack in stacks)
    return Activations(kept=kept, working=working, loss=_loss(job, recipe, stacks[-1]))


def _rules(job: Job, recipe: Recipe) -> Rules:
    facts, on_cpu = job.facts, job.cluster.device.is_cpu
    # On a CPU torch's attention with dropout falls back to the unfused form.
    eager = job.eager_attention or (on_cpu and facts.attention_dropout > 0)
    return Rules(facts=facts, recipe=recipe, eager=eager, on_cpu=on_cpu)


def _kept_per_block(rules: Rules, stack: Stack, checkpointing: str) -> float:
    if checkpointing == "full":
        return stack.tokens * stack.hidden * rules.recipe.residual
    if checkpointing == "selective":
        return min(selective_bytes(rules, stack), block_bytes(rules, stack))
    return block_bytes(rules, stack)


def _working_per_block(rules: Rules, stack: Stack, checkpointing: str) -> float:
    working = working_bytes(rules, stack)
    if checkpointing == "none":
        return working
    return working + block_bytes(rules, stack)


def _around_blocks(rules: Rules, last: Stack) -> float:
    """Embedding output with its dropout mask, the final norm and the head's input."""
    dropout = rules.mask_bytes if rules.facts.hidden_dropout > 0 else 0
    final_norm = rules.norm_bytes() if rules.facts.final_norm else 0
    return last.tokens * last.hidden * (dropout + final_norm + rules.compute)


def _loss(job: Job, recipe: Recipe, last: Stack) -> float:
    """Logits and cross-entropy: the largest set alive.

    Causal models upcast the logits: log-softmax, its gradient and the loss's gradient are fp32, 12 bytes per logit
    (traced). Models that call a plain cross-entropy stay in the compute dtype unless autocast raises it.
    """
    facts = job.facts
    if job.workload.task in ("seq-cls", "image-cls") or facts.kind in ("vision", "vision-text") or not facts.vocab_size:
        return 0.0
    logits = last.tokens * facts.vocab_size / job.configuration.tp
    plain = facts.kind not in ("decoder", "vision-language")
    if plain and not recipe.autocast:
        return logits * 3 * recipe.compute
    return logits * (14 if plain else 12)


def _custom(job: Job, recipe: Recipe) -> Activations:
    """A module that no closed form describes: from its trace, or from its parameters where it could not be traced."""
    traced = job.facts.traced.get(precision_mode(recipe))
    if traced is None:
        return _untraced(job, recipe)
    samples = job.configuration.micro_batch_size
    checkpointing = job.configuration.activation_checkpointing
    blocks = sum(block.repeats for block in job.counts.blocks)
    kept, working = traced.kept, max(traced.backward - traced.kept, 0.0)
    if checkpointing != "none":
        stays = traced.boundary + (traced.products if checkpointing == "selective" else 0.0)
        saved = max(traced.block - stays, 0.0)
        kept, working = kept - blocks * saved, working + saved
    return Activations(
        kept=samples * kept, working=samples * working, loss=samples * max(traced.forward - traced.kept, 0.0)
    )


def precision_mode(recipe: Recipe) -> str:
    """The name a trace goes by: what a precision means for activations."""
    if recipe.autocast:
        return "autocast"
    return "fp32" if recipe.compute == 4 else "pure"


def _untraced(job: Job, recipe: Recipe) -> Activations:
    """A module of which only the parameters are known.

    The blocks are taken as a transformer's of the same parameters: a block of P parameters of width h has P/h elements
    of matrix width per token, each kept once by the linear that reads it and once by what follows it.
    """
    facts, configuration = job.facts, job.configuration
    hidden = max(facts.hidden_size, 1)
    tokens = job.tokens_per_micro_batch
    blocks = job.counts.blocks
    width = sum(block.parameters * block.repeats for block in blocks) / hidden
    largest = max((block.parameters for block in blocks), default=0) / hidden
    per_element = 2 * recipe.compute
    logits = tokens * facts.vocab_size
    boundaries = sum(block.repeats for block in blocks) * tokens * hidden * recipe.residual
    kept = tokens * width * per_element if configuration.activation_checkpointing == "none" else boundaries
    working = tokens * largest * per_element * (1 if configuration.activation_checkpointing == "none" else 2)
    return Activations(kept=kept, working=working, loss=logits * 12)
