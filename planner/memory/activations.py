"""Activations of one micro-batch: what all blocks keep, what the loss needs, what a block's backward works with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.job import Job
from planner.memory.recipe import Recipe
from planner.memory.saved import IMAGE_TOWER, T5_FAMILY, Rules, Stack, block_bytes, selective_bytes, working_bytes
from planner.memory.towers import stacks_of
from planner.models.facts import ModelFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes on one device.

    `kept`: saved by all blocks, embeddings and the final norm when the forward pass ends; `working`: the largest set of
    tensors inside one block's backward, with its recomputed activations under checkpointing; `last_block`: the same
    where all other blocks are done, with what the block kept itself; `loss`: logits and the loss's intermediates at
    their largest.
    """

    kept: float
    working: float
    last_block: float
    loss: float


def activations_of(job: Job, recipe: Recipe) -> Activations:
    """Activations of the busiest pipeline stage."""
    if job.facts.kind == "custom":
        return _custom(job, recipe)
    rules = _rules(job, recipe)
    stacks = stacks_of(job)
    images = job.facts.kind == "vision-language"
    blocks = [(_image_rules(rules) if images and stack is not stacks[-1] else rules, stack) for stack in stacks]
    checkpointing = job.configuration.activation_checkpointing
    in_flight = job.configuration.pp
    kept = sum(stack.layers * _kept_per_block(code, stack, checkpointing) for code, stack in blocks) * in_flight
    kept += _around_blocks(rules, stacks)
    last_block = max(working_bytes(code, stack) + block_bytes(code, stack) for code, stack in blocks)
    working = last_block if checkpointing != "none" else max(working_bytes(code, stack) for code, stack in blocks)
    return Activations(kept=kept, working=working, last_block=last_block, loss=_loss(job, recipe, stacks[-1]))


def _rules(job: Job, recipe: Recipe) -> Rules:
    facts, on_cpu = job.facts, job.cluster.device.is_cpu
    eager = job.eager_attention
    return Rules(
        facts=facts,
        recipe=recipe,
        eager=eager,
        on_cpu=on_cpu,
        unfused=not eager and _no_fused_kernel(facts, job.configuration.attention, on_cpu=on_cpu),
        takes_masks=job.configuration.attention == "sdpa",
    )


def _image_rules(rules: Rules) -> Rules:
    """The image tower of a vision-language model, which is a SigLIP whatever the language model is."""
    facts = replace(
        rules.facts,
        model_type=IMAGE_TOWER,
        activation="gelu",
        gated_mlp=False,
        norm="layernorm",
        norms_per_layer=2,
        position_type="learned",
        qk_norm=False,
        sliding_window=0,
    )
    return replace(rules, facts=facts)


def _no_fused_kernel(facts: ModelFacts, attention: str, *, on_cpu: bool) -> bool:
    """Whether torch's scaled_dot_product_attention has only its unfused form for a model.

    No kernel takes one key head for many query heads without being told, as Falcon's multi-query attention calls it. A
    CPU's kernel takes neither dropout, nor a mask that needs a gradient, nor values of another width than keys.
    """
    multi_query = facts.model_type == "falcon" and not facts.new_decoder_architecture and facts.num_kv_heads == 1
    if multi_query and attention == "sdpa":
        return True
    return on_cpu and (facts.attention_dropout > 0 or facts.model_type in T5_FAMILY or facts.mla is not None)


def _kept_per_block(rules: Rules, stack: Stack, checkpointing: str) -> float:
    if checkpointing == "full":
        return stack.tokens * stack.hidden * rules.recipe.residual
    if checkpointing == "selective":
        return min(selective_bytes(rules, stack), block_bytes(rules, stack))
    return block_bytes(rules, stack)


def _around_blocks(rules: Rules, stacks: tuple[Stack, ...]) -> float:
    """Embedding output with its dropout mask and norm, final norms, the head's input with what comes before it, and an
    audio model's convolutions."""
    facts, last = rules.facts, stacks[-1]
    element = last.tokens * last.hidden
    dropout = rules.mask_bytes if facts.hidden_dropout > 0 else 0
    embedding_norm = rules.recipe.residual if facts.embedding_layernorm else 0
    transform = 2 * rules.compute if facts.mlm_transform else 0
    kept = element * (dropout + embedding_norm + transform + rules.compute)
    if facts.final_norm:
        kept += rules.norm_bytes() * (sum(s.tokens * s.hidden for s in stacks) if len(stacks) > 1 else element)
    if facts.model_type in T5_FAMILY:  # position biases of encoder, decoder and cross-attention, for all layers
        kept += 3 * last.heads * last.length * max(last.length, last.memory_length) * rules.recipe.residual
    return kept + (_audio_stem(rules, stacks[0]) if facts.num_mel_bins else 0.0)


def _audio_stem(rules: Rules, encoder: Stack) -> float:
    """Whisper's two convolutions: both sides of the GELU at full length, and the second one's output at half of it."""
    return (2 * 2 + 1) * encoder.tokens * encoder.hidden * rules.compute


def _loss(job: Job, recipe: Recipe, last: Stack) -> float:
    """Logits and cross-entropy: the largest set alive.

    Causal models upcast the logits: log-softmax, its gradient and the loss's gradient are fp32, 12 bytes per logit
    (traced). Models that call a plain cross-entropy stay in the compute dtype unless autocast raises it.
    """
    facts = job.facts
    if job.workload.task in ("seq-cls", "image-cls") or facts.kind in ("vision", "vision-text") or not facts.vocab_size:
        return 0.0
    logits = last.tokens * facts.vocab_size / job.configuration.tp
    plain = facts.kind not in ("decoder", "vision-language") and facts.model_type != "modernbert"
    softcap = recipe.compute if facts.final_logit_softcapping else 0  # what tanh keeps
    return logits * (softcap + 3 * (recipe.compute if plain and not recipe.autocast else 4))


def _custom(job: Job, recipe: Recipe) -> Activations:
    """A module that no closed form describes: from its trace, or from its parameters where it could not be traced."""
    traced = job.facts.traced.get(precision_mode(recipe))
    if traced is None:
        return _untraced(job, recipe)
    samples = job.configuration.micro_batch_size
    checkpointing = job.configuration.activation_checkpointing
    blocks = sum(block.repeats for block in job.counts.blocks)
    kept, working = traced.kept, max(traced.backward - traced.kept, 0.0)
    last_block = working + traced.block
    if checkpointing != "none":
        stays = traced.boundary + (traced.products if checkpointing == "selective" else 0.0)
        saved = max(traced.block - stays, 0.0)
        kept, working = kept - blocks * saved, working + saved
    return Activations(
        kept=samples * kept,
        working=samples * working,
        last_block=samples * last_block,
        loss=samples * max(traced.forward - traced.kept, 0.0),
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
    block = tokens * largest * per_element
    working = block if configuration.activation_checkpointing == "none" else 2 * block
    return Activations(kept=kept, working=working, last_block=2 * block, loss=logits * 12)
