"""Decoder-only language models, dense and mixture-of-experts."""

from __future__ import annotations

from planner.models.counting.moe import routed_experts, router_and_shared
from planner.models.counting.weights import NOTHING, Weights, attention, matrix, mlp, norm, norms
from planner.models.facts import ModelFacts
from planner.models.parameter_counts import BlockCount, ParameterCounts


def count_decoder(facts: ModelFacts) -> ParameterCounts:
    """A decoder with its language-model head."""
    final_norm = norm(facts) if facts.final_norm else NOTHING
    return ParameterCounts(
        embedding=_embedding(facts).total,
        blocks=decoder_blocks(facts),
        head=_head(facts),
        other=final_norm.total + _projection_out(facts),
    )


def decoder_blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    """The stack of layers; leading dense layers of a mixture of experts come first."""
    common = attention(facts) + norms(facts, facts.norms_per_layer)
    dense = common + mlp(facts, facts.intermediate_size)
    if not facts.is_moe:
        return (_block("decoder", facts.num_layers, dense),)
    experts = routed_experts(facts)
    sparse = common + experts + router_and_shared(facts)
    moe = _block("moe", facts.num_layers - facts.first_k_dense, sparse, experts.total)
    return (_block("dense", facts.first_k_dense, dense), moe) if facts.first_k_dense else (moe,)


def _block(name: str, repeats: int, weights: Weights, experts: int = 0) -> BlockCount:
    return BlockCount(
        name=name, repeats=repeats, parameters=weights.total, experts=experts, largest_matrix=weights.largest
    )


def _embedding(facts: ModelFacts) -> Weights:
    width = facts.word_embed_proj_dim or facts.hidden_size
    tokens = matrix(facts.vocab_size, width)
    if facts.learned_positions:
        tokens += matrix(facts.max_position_embeddings + facts.position_offset, facts.hidden_size)
    if width != facts.hidden_size:
        tokens += matrix(width, facts.hidden_size)
    return tokens + norm(facts) if facts.embedding_layernorm else tokens


def _projection_out(facts: ModelFacts) -> int:
    """OPT-350m projects back to the embedding's width before the head."""
    width = facts.word_embed_proj_dim or facts.hidden_size
    return 0 if width == facts.hidden_size else width * facts.hidden_size


def is_bare(facts: ModelFacts) -> bool:
    """Whether the class is the stack without a head (`LlamaModel`); ChatGLM's one class, of that name, has a head."""
    return facts.architecture.endswith("Model") and not facts.architecture.endswith(("LMHeadModel", "ChatGLMModel"))


def _head(facts: ModelFacts) -> int:
    if is_bare(facts):
        return 0
    if facts.architecture.endswith("ForSequenceClassification"):
        return facts.hidden_size * facts.num_labels
    untied = 0 if facts.tie_word_embeddings else facts.vocab_size * (facts.word_embed_proj_dim or facts.hidden_size)
    return untied + (facts.vocab_size if facts.lm_head_bias else 0)
