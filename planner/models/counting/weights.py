"""Sizes of the parts that every transformer block is made of."""

from __future__ import annotations

from dataclasses import dataclass

from planner.models.facts import MlaFacts, ModelFacts


@dataclass(frozen=True, slots=True)
class Weights:
    """Some weight tensors: elements in all, and in the largest single tensor."""

    total: int
    largest: int

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.total + other.total, max(self.largest, other.largest))


NOTHING = Weights(0, 0)


def matrix(rows: int, columns: int) -> Weights:
    return Weights(rows * columns, rows * columns)


def vector(width: int) -> Weights:
    return Weights(width, width)


def linear(inputs: int, outputs: int, *, bias: bool) -> Weights:
    return matrix(inputs, outputs) + (vector(outputs) if bias else NOTHING)


def norm(facts: ModelFacts, width: int = 0) -> Weights:
    """One normalisation of `width` (by default the hidden size): a weight, and a bias where there is one."""
    if facts.norm == "nonparametric_layernorm":
        return NOTHING
    weight = vector(width or facts.hidden_size)
    return weight + weight if facts.norm_bias else weight


def attention(facts: ModelFacts) -> Weights:
    """Query, key, value and output projections with whatever norms and sinks the architecture adds to them."""
    if facts.mla is not None:
        return _latent_attention(facts, facts.mla)
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    if facts.fused_qkv:
        inputs = linear(facts.hidden_size, queries + 2 * keys, bias=facts.qkv_bias)
    else:
        key = linear(facts.hidden_size, keys, bias=facts.qkv_bias and facts.k_bias)
        value = linear(facts.hidden_size, keys, bias=facts.qkv_bias)
        inputs = linear(facts.hidden_size, queries, bias=facts.qkv_bias) + key + value
    output = linear(queries, facts.hidden_size, bias=facts.attn_out_bias)
    sinks = vector(facts.num_heads) if facts.attention_sinks else NOTHING
    return inputs + output + _query_key_norm(facts, queries, keys) + sinks


def _query_key_norm(facts: ModelFacts, queries: int, keys: int) -> Weights:
    if not facts.qk_norm:
        return NOTHING
    if facts.qk_norm is True:
        return vector(facts.head_dim) + vector(facts.head_dim)
    return vector(queries) + vector(keys)


def _latent_attention(facts: ModelFacts, mla: MlaFacts) -> Weights:
    """Multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""
    hidden, heads = facts.hidden_size, facts.num_heads
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        query = matrix(hidden, query_width)
    else:
        query = matrix(hidden, mla.q_lora_rank) + vector(mla.q_lora_rank) + matrix(mla.q_lora_rank, query_width)
    compressed = matrix(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim) + vector(mla.kv_lora_rank)
    expanded = matrix(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    return query + compressed + expanded + matrix(heads * mla.v_head_dim, hidden)


def mlp(facts: ModelFacts, width: int) -> Weights:
    """The feed-forward part, `width` units between its projections; gated MLPs have a third projection."""
    hidden, bias = facts.hidden_size, facts.mlp_bias
    if not facts.gated_mlp:
        inputs = linear(hidden, width, bias=bias)
    elif facts.fused_gate_up:
        inputs = linear(hidden, 2 * width, bias=bias)
    else:
        inputs = linear(hidden, width, bias=bias) + linear(hidden, width, bias=bias)
    return inputs + linear(width, hidden, bias=bias)


def norms(facts: ModelFacts, how_many: int) -> Weights:
    one = norm(facts)
    return Weights(one.total * how_many, one.largest)
