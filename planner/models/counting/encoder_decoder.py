"""Encoder-decoders: T5, BART and its relatives, Whisper."""

from __future__ import annotations

from planner.models.counting.weights import (
    NOTHING,
    Weights,
    attention,
    block_count,
    counted,
    linear,
    mlp,
    norms,
    tensor,
    vector,
)
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts


def count_encoder_decoder(facts: ModelFacts) -> ParameterCounts:
    """Both stacks, the shared token table, and an untied head where there is one.

    T5 and mT5: `tie_word_embeddings` false means that the published checkpoint stores a head of its own (flan-t5,
    mT5). A model that transformers 5 builds from such a config is tied all the same, but `from_pretrained` finds two
    different tensors in the checkpoint and keeps both; so the head is counted: it is in memory, and trained, in
    fine-tuning.
    """
    has_head = not facts.tie_word_embeddings and not facts.architecture.endswith("Model")
    classifies = facts.architecture.endswith("ForSequenceClassification")
    positions, embedding_norms = _positions(facts), norms(facts, 2 if facts.embedding_layernorm else 0)
    final_norms = norms(facts, 2 if _has_final_norms(facts) else 0)
    table = tensor(facts.vocab_size, facts.hidden_size)
    return counted(
        embedding=table + positions + embedding_norms + _audio_stem(facts),
        blocks=_blocks(facts),
        head=_classifier(facts) if classifies else table if has_head else NOTHING,
        other=final_norms + _relative_positions(facts),
    )


def _classifier(facts: ModelFacts) -> Weights:
    hidden = facts.hidden_size
    return linear(hidden, hidden, bias=True) + linear(hidden, facts.num_labels, bias=True)


def _relative_positions(facts: ModelFacts) -> Weights:
    """T5's two tables of relative positions, one per stack."""
    if not facts.relative_attention_num_buckets:
        return NOTHING
    table = tensor(facts.relative_attention_num_buckets, facts.num_heads)
    return table + table


def _has_final_norms(facts: ModelFacts) -> bool:
    return facts.final_norm and not facts.post_norm


def _positions(facts: ModelFacts) -> Weights:
    """Position tables of both stacks.

    Whisper has two lengths. Pegasus keeps its fixed sinusoids as (frozen) parameters; M2M-100 as buffers, not counted.
    """
    hidden = facts.hidden_size
    if facts.max_source_positions:
        return tensor(facts.max_source_positions, hidden) + tensor(facts.max_target_positions, hidden)
    if facts.learned_positions or facts.model_type == "pegasus":
        one = tensor(facts.max_position_embeddings + facts.position_offset, hidden)
        return one + one
    return NOTHING


def _audio_stem(facts: ModelFacts) -> Weights:
    """Whisper's two convolutions of width 3 over the mel spectrogram."""
    if not facts.num_mel_bins:
        return NOTHING
    hidden = facts.hidden_size
    first, second = tensor(hidden, facts.num_mel_bins, 3), tensor(hidden, hidden, 3)
    return first + vector(hidden) + second + vector(hidden)


def _blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    attend = attention(facts)
    encoder = attend + mlp(facts, facts.intermediate_size) + norms(facts, 2)
    decoder_width = facts.decoder_intermediate_size or facts.intermediate_size
    decoder = attend + attend + mlp(facts, decoder_width) + norms(facts, 3)
    return (
        block_count("encoder", facts.encoder_layers or facts.num_layers, encoder),
        block_count("decoder", facts.decoder_layers, decoder),
    )
