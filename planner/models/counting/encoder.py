"""Encoder-only language models: BERT and its relatives."""

from __future__ import annotations

from planner.models.counting.weights import (
    NOTHING,
    Weights,
    attention,
    block_count,
    counted,
    linear,
    mlp,
    norm,
    norms,
    tensor,
    vector,
)
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts


def count_encoder(facts: ModelFacts) -> ParameterCounts:
    """An encoder with the head that its architecture's name says (`ForMaskedLM`, `ForPreTraining`, none for `Model`).

    ALBERT's pooler belongs to `AlbertModel`; `AlbertForMaskedLM`, which the catalogue names, is built without it.
    """
    return counted(
        embedding=_embedding(facts),
        blocks=_blocks(facts),
        head=_head(facts),
        other=_relative_positions(facts) + _pooler(facts) + _final_norm(facts),
    )


def _embedding(facts: ModelFacts) -> Weights:
    width = facts.embedding_size or facts.hidden_size
    tables = tensor(facts.vocab_size, width)
    if facts.type_vocab_size:
        tables += tensor(facts.type_vocab_size, width)
    if facts.learned_positions:
        tables += tensor(facts.max_position_embeddings, width)
    if facts.embedding_layernorm:
        tables += norm(facts, width)
    # ALBERT maps from the embedding's width to the hidden width even where they are equal, ELECTRA does not.
    if facts.shared_layers or width != facts.hidden_size:
        tables += linear(width, facts.hidden_size, bias=True)
    return tables


def _blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    block = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, facts.norms_per_layer)
    if facts.position_buckets and not facts.share_att_key:
        positions = linear(facts.hidden_size, facts.hidden_size, bias=True)
        block += positions + positions
    repeats = 1 if facts.shared_layers else facts.num_layers
    if facts.model_type != "modernbert":
        return (block_count("encoder", repeats, block),)
    # ModernBERT's first layer has no norm before its attention: the embeddings were normalised just before.
    first = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, facts.norms_per_layer - 1)
    return (block_count("encoder", 1, first), block_count("encoder", facts.num_layers - 1, block))


def _relative_positions(facts: ModelFacts) -> Weights:
    """DeBERTa's table of relative positions [2 * buckets, hidden] and its norm."""
    if not facts.position_buckets:
        return NOTHING
    return tensor(2 * facts.position_buckets, facts.hidden_size) + norm(facts)


def _pooler(facts: ModelFacts) -> Weights:
    return linear(facts.hidden_size, facts.hidden_size, bias=True) if facts.pooler else NOTHING


def _final_norm(facts: ModelFacts) -> Weights:
    return norm(facts) if facts.model_type == "modernbert" else NOTHING


def _head(facts: ModelFacts) -> Weights:
    built = facts.architecture
    if built.endswith("ForMaskedLM"):
        return _masked_lm_head(facts)
    if built.endswith("ForPreTraining"):
        return _pretraining_head(facts)
    if built.endswith("ForSequenceClassification"):
        return _dense(facts) + linear(facts.hidden_size, facts.num_labels, bias=True)
    if built.endswith(("ForTokenClassification", "ForQuestionAnswering")):
        dense = _dense(facts) if facts.model_type == "modernbert" else NOTHING
        return dense + linear(facts.hidden_size, facts.num_labels, bias=True)
    return NOTHING


def _masked_lm_head(facts: ModelFacts) -> Weights:
    """A projection to the embedding's width, its norm, and the bias of the decoder that is tied to the embedding."""
    width = facts.embedding_size or facts.hidden_size
    head = linear(facts.hidden_size, width, bias=facts.norm_bias) + norm(facts, width)
    if not facts.tie_word_embeddings:
        head += tensor(facts.vocab_size, width)
    return head + vector(facts.vocab_size) if facts.lm_head_bias else head


def _pretraining_head(facts: ModelFacts) -> Weights:
    """ELECTRA's discriminator; for BERT and ALBERT the masked-LM head, a pooler and the sentence-order classifier."""
    dense = linear(facts.hidden_size, facts.hidden_size, bias=True)
    if facts.model_type == "electra":
        return dense + linear(facts.hidden_size, 1, bias=True)
    return _masked_lm_head(facts) + dense + linear(facts.hidden_size, 2, bias=True)


def _dense(facts: ModelFacts) -> Weights:
    """The layer before a classifier (BERT calls it the pooler); ModernBERT's has a norm and no bias."""
    dense = linear(facts.hidden_size, facts.hidden_size, bias=facts.norm_bias)
    return dense + norm(facts) if facts.model_type == "modernbert" else dense
