"""Arguments of transformers configs that many families share."""

from __future__ import annotations

from typing import Any

from planner.models.facts import ModelFacts

Arguments = dict[str, Any]


def standard(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "intermediate_size": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "hidden_act": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def grouped(facts: ModelFacts) -> Arguments:
    return standard(facts) | {"num_key_value_heads": facts.num_kv_heads, "head_dim": facts.head_dim}


def windowed(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {"sliding_window": facts.sliding_window or None}


def partly_rotated(facts: ModelFacts) -> Arguments:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": facts.rotary_pct}
    return {"rope_parameters": rope}
