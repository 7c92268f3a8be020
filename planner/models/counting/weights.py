"""Sizes of the parts that every transformer block is made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from planner.models.facts import BlockCount, MlaFacts, ModelFacts, ParameterCounts, Shape

# GPT-2's projections are transformers' Conv1D, which keeps [inputs, outputs] where a linear layer keeps the transpose;
# GPT-OSS keeps its experts so.
_INPUTS_FIRST = ("gpt2",)
_EXPERTS_INPUTS_FIRST = ("gpt_oss",)


@dataclass(frozen=True, slots=True)
class Weights:
    """Some weight tensors, by their shapes as the module keeps them; `frozen` are the places of those not trained."""

    shapes: tuple[Shape, ...]
    frozen: tuple[int, ...] = ()

    def __add__(self, other: Weights) -> Weights:
        moved = (len(self.shapes) + place for place in other.frozen)
        return Weights(self.shapes + other.shapes, (*self.frozen, *moved))

    @property
    def total(self) -> int:
        return sum(map(prod, self.shapes))

    @property
    def largest(self) -> int:
        return max(map(prod, self.shapes), default=0)


NOTHING = Weights(())


def counted(*, embedding: Weights, blocks: tuple[BlockCount, ...], head: Weights, other: Weights) -> ParameterCounts:
    """The counts of a model of which every weight is known."""
    outside = embedding + other + head
    return ParameterCounts(
        embedding=embedding.total,
        blocks=blocks,
        head=head.total,
        other=other.total,
        outside=outside.shapes,
        frozen=outside.frozen,
    )


def block_count(name: str, repeats: int, weights: Weights, experts: int = 0) -> BlockCount:
    """`repeats` blocks of these weights, `experts` elements of which belong to routed experts."""
    return BlockCount(
        name=name,
        repeats=repeats,
        parameters=weights.total,
        experts=experts,
        largest_matrix=weights.largest,
        shapes=weights.shapes,
        frozen=weights.frozen,
    )


def tensor(*shape: int) -> Weights:
    return Weights((shape,))


def vector(width: int) -> Weights:
    return tensor(width)


def linear(inputs: int, outputs: int, *, bias: bool) -> Weights:
    weight = tensor(outputs, inputs)
    return weight + vector(outputs) if bias else weight


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
    return _as_stored(facts, inputs + output) + _query_key_norm(facts, queries, keys) + sinks


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
        query = tensor(query_width, hidden)
    else:
        query = tensor(mla.q_lora_rank, hidden) + vector(mla.q_lora_rank) + tensor(query_width, mla.q_lora_rank)
    compressed = tensor(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden) + vector(mla.kv_lora_rank)
    expanded = tensor(heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    return query + compressed + expanded + tensor(hidden, heads * mla.v_head_dim)


def mlp(facts: ModelFacts, width: int) -> Weights:
    """The feed-forward part, `width` units between its projections; gated MLPs have a third projection."""
    hidden, bias = facts.hidden_size, facts.mlp_bias
    if not facts.gated_mlp:
        inputs = linear(hidden, width, bias=bias)
    elif facts.fused_gate_up:
        inputs = linear(hidden, 2 * width, bias=bias)
    else:
        inputs = linear(hidden, width, bias=bias) + linear(hidden, width, bias=bias)
    return _as_stored(facts, inputs + linear(width, hidden, bias=bias))


def norms(facts: ModelFacts, how_many: int) -> Weights:
    return Weights(norm(facts).shapes * how_many)


def _as_stored(facts: ModelFacts, projections: Weights) -> Weights:
    return _swapped(projections) if facts.model_type in _INPUTS_FIRST else projections


def experts_as_stored(facts: ModelFacts, projections: Weights) -> Weights:
    """The stacked projections of all experts, in the order of dimensions that the architecture keeps them in."""
    return _swapped(projections) if facts.model_type in _EXPERTS_INPUTS_FIRST else projections


def _swapped(matrices: Weights) -> Weights:
    """Last two dimensions exchanged; vectors stay as they are."""
    return Weights(tuple((*s[:-2], s[-1], s[-2]) if len(s) > 1 else s for s in matrices.shapes))


# Mixture-of-experts feed-forward parts.


def expert_parameters(facts: ModelFacts) -> int:
    """Parameters of one routed expert."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    inputs = 2 * width if facts.gated_mlp else width
    return hidden * (inputs + width) + (inputs + hidden if facts.expert_bias else 0)


def routed_experts(facts: ModelFacts) -> Weights:
    """All routed experts; transformers 5 keeps them in [experts, 2 * width, hidden] and [experts, hidden, width]."""
    experts, hidden, width = facts.num_experts, facts.hidden_size, facts.moe_intermediate_size
    inputs = (2 if facts.gated_mlp else 1) * width
    weights = experts_as_stored(facts, tensor(experts, inputs, hidden) + tensor(experts, hidden, width))
    return weights + tensor(experts, inputs) + tensor(experts, hidden) if facts.expert_bias else weights


def router_and_shared(facts: ModelFacts) -> Weights:
    """The router, the experts every token passes through, and their gate."""
    router = linear(facts.hidden_size, facts.num_experts, bias=facts.router_bias)
    width = facts.shared_expert_intermediate_size or facts.num_shared_experts * facts.moe_intermediate_size
    shared = mlp(facts, width) if facts.num_shared_experts else NOTHING
    return router + shared + (tensor(1, facts.hidden_size) if facts.shared_expert_gate else NOTHING)
