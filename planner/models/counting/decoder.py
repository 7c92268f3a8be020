"""Decoder-only language models, dense and mixture-of-experts."""

from __future__ import annotations

from planner.models.counting.weights import (
    NOTHING,
    Weights,
    attention,
    block_count,
    counted,
    mlp,
    norm,
    norms,
    routed_experts,
    router_and_shared,
    tensor,
    vector,
)
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts


def count_decoder(facts: ModelFacts) -> ParameterCounts:
    """A decoder with its language-model head."""
    final_norm = norm(facts) if facts.final_norm else NOTHING
    return counted(
        embedding=_embedding(facts),
        blocks=decoder_blocks(facts),
        head=_head(facts),
        other=final_norm + _projection_out(facts),
    )


def decoder_blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    """The stack of layers; leading dense layers of a mixture of experts come first."""
    common = attention(facts) + norms(facts, facts.norms_per_layer)
    dense = common + mlp(facts, facts.intermediate_size)
    if not facts.is_moe:
        return (block_count("decoder", facts.num_layers, dense),)
    experts = routed_experts(facts)
    sparse = common + experts + router_and_shared(facts)
    moe = block_count("moe", facts.num_layers - facts.first_k_dense, sparse, experts.total)
    return (block_count("dense", facts.first_k_dense, dense), moe) if facts.first_k_dense else (moe,)


def _embedding(facts: ModelFacts) -> Weights:
    width = facts.word_embed_proj_dim or facts.hidden_size
    tokens = tensor(facts.vocab_size, width)
    if facts.learned_positions:
        tokens += tensor(facts.max_position_embeddings + facts.position_offset, facts.hidden_size)
    if width != facts.hidden_size:
        tokens += tensor(facts.hidden_size, width)
    return tokens + norm(facts) if facts.embedding_layernorm else tokens


def _projection_out(facts: ModelFacts) -> Weights:
    """OPT-350m projects back to the embedding's width before the head."""
    width = facts.word_embed_proj_dim or facts.hidden_size
    return NOTHING if width == facts.hidden_size else tensor(width, facts.hidden_size)


def is_bare(facts: ModelFacts) -> bool:
    """Whether the class is the stack without a head (`LlamaModel`); ChatGLM's one class, of that name, has a head."""
    return facts.architecture.endswith("Model") and not facts.architecture.endswith(("LMHeadModel", "ChatGLMModel"))


def _head(facts: ModelFacts) -> Weights:
    if is_bare(facts):
        return NOTHING
    if facts.architecture.endswith("ForSequenceClassification"):
        return tensor(facts.num_labels, facts.hidden_size)
    width = facts.word_embed_proj_dim or facts.hidden_size
    untied = NOTHING if facts.tie_word_embeddings else tensor(facts.vocab_size, width)
    return untied + (vector(facts.vocab_size) if facts.lm_head_bias else NOTHING)
