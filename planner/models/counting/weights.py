"""Sizes of the parts that every transformer block is made of."""

from __future__ import annotations

from math import prod

from hardware_db.records import dataclass
from planner.models.facts import BlockCount, MlaFacts, ModelFacts, ParameterCounts, Shape

# GPT-2's projections are transformers' Conv1D, which keeps [inputs, outputs] where a linear layer keeps the transpose;
# GPT-OSS keeps its experts so.
_INPUTS_FIRST = ("gpt2",)
_EXPERTS_INPUTS_FIRST = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Some weight tensors, by their shapes as the module keeps them; `frozen` are the places of those not trained.

    `names` are what they are in the architecture, whatever a code base calls them (`planner.models.counting.names`).
    """

    shapes: tuple[Shape, ...]
    frozen: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __add__(self, other: Weights) -> Weights:
        moved = (len(self.shapes) + index for index in other.frozen)
        return Weights(shapes=self.shapes + other.shapes, frozen=(*self.frozen, *moved), names=self.names + other.names)

    def inside(self, part: str) -> Weights:
        """Return the same weights as those of a part of the model."""
        return Weights(shapes=self.shapes, frozen=self.frozen, names=tuple(f"{part}.{name}" for name in self.names))

    @property
    def total(self) -> int:
        """Elements of all of them."""
        return sum(map(prod, self.shapes))

    @property
    def largest(self) -> int:
        """Elements of the largest matrix."""
        return max(map(prod, self.shapes), default=0)


NOTHING = Weights(shapes=())


def count_weights(
    *, embedding: Weights, blocks: tuple[BlockCount, ...], head: Weights, other: Weights
) -> ParameterCounts:
    """Return the counts of a model of which every weight is known."""
    outside = embedding + other + head
    return ParameterCounts(
        embedding=embedding.total,
        blocks=blocks,
        head=head.total,
        other=other.total,
        outside=outside.shapes,
        frozen=outside.frozen,
        names=outside.names,
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
        names=weights.names,
    )


def tensor(*shape: int, name: str) -> Weights:
    """Return a weight of any shape."""
    return Weights(shapes=(shape,), names=(name,))


def vector(width: int, name: str) -> Weights:
    """Return a weight of one dimension, such as a norm's."""
    return tensor(width, name=name)


def linear(inputs: int, outputs: int, name: str, *, bias: bool) -> Weights:
    """Return the weight of a linear layer, and its bias where it has one."""
    weight = tensor(outputs, inputs, name=f"{name}.weight")
    return weight + vector(outputs, f"{name}.bias") if bias else weight


def norm(facts: ModelFacts, width: int = 0, name: str = "norm") -> Weights:
    """One normalisation of `width` (by default the hidden size): a weight, and a bias where there is one."""
    if facts.norm == "nonparametric_layernorm":
        return NOTHING
    weight = vector(width or facts.hidden_size, f"{name}.weight")
    return weight + vector(width or facts.hidden_size, f"{name}.bias") if facts.norm_bias else weight


def attention(facts: ModelFacts) -> Weights:
    """Query, key, value and output projections with whatever norms and sinks the architecture adds to them."""
    if facts.mla is not None:
        return _latent_attention(facts, facts.mla)
    queries, keys = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    if facts.fused_qkv:
        inputs = linear(facts.hidden_size, queries + 2 * keys, "qkv", bias=facts.qkv_bias)
    else:
        key = linear(facts.hidden_size, keys, "k", bias=facts.qkv_bias and facts.k_bias)
        value = linear(facts.hidden_size, keys, "v", bias=facts.qkv_bias)
        inputs = linear(facts.hidden_size, queries, "q", bias=facts.qkv_bias) + key + value
    output = linear(queries, facts.hidden_size, "o", bias=facts.attn_out_bias)
    sinks = vector(facts.num_heads, "sinks") if facts.attention_sinks else NOTHING
    return _as_stored(facts, inputs + output) + _query_key_norm(facts, queries, keys) + sinks


def _query_key_norm(facts: ModelFacts, queries: int, keys: int) -> Weights:
    if not facts.qk_norm:
        return NOTHING
    widths = (facts.head_dim, facts.head_dim) if facts.qk_norm is True else (queries, keys)
    return vector(widths[0], "q_norm.weight") + vector(widths[1], "k_norm.weight")


def _latent_attention(facts: ModelFacts, mla: MlaFacts) -> Weights:
    """Multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""
    hidden, heads = facts.hidden_size, facts.num_heads
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        query = tensor(query_width, hidden, name="q.weight")
    else:
        query = tensor(mla.q_lora_rank, hidden, name="q_a.weight") + vector(mla.q_lora_rank, "q_a_norm.weight")
        query += tensor(query_width, mla.q_lora_rank, name="q_b.weight")
    compressed = tensor(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden, name="kv_a.weight")
    compressed += vector(mla.kv_lora_rank, "kv_a_norm.weight")
    expanded = tensor(heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, name="kv_b.weight")
    return query + compressed + expanded + tensor(hidden, heads * mla.v_head_dim, name="o.weight")


def mlp(facts: ModelFacts, width: int) -> Weights:
    """Return the feed-forward part, `width` units between its projections; gated MLPs have a third projection."""
    hidden, bias = facts.hidden_size, facts.mlp_bias
    if not facts.gated_mlp:
        inputs = linear(hidden, width, "up", bias=bias)
    elif facts.fused_gate_up:
        inputs = linear(hidden, 2 * width, "gate_up", bias=bias)
    else:
        inputs = linear(hidden, width, "gate", bias=bias) + linear(hidden, width, "up", bias=bias)
    return _as_stored(facts, inputs + linear(width, hidden, "down", bias=bias))


def norms(facts: ModelFacts, how_many: int) -> Weights:
    """Return so many norms of a width, with biases where the architecture has them."""
    return sum((norm(facts, name=f"norm{number}") for number in range(1, how_many + 1)), NOTHING)


def _as_stored(facts: ModelFacts, projections: Weights) -> Weights:
    return _swap(projections) if facts.model_type in _INPUTS_FIRST else projections


def experts_as_stored(facts: ModelFacts, projections: Weights) -> Weights:
    """Return the stacked projections of all experts, in the order of dimensions that the architecture keeps them in."""
    return _swap(projections) if facts.model_type in _EXPERTS_INPUTS_FIRST else projections


def _swap(matrices: Weights) -> Weights:
    """Last two dimensions exchanged; vectors stay as they are."""
    shapes = tuple((*s[:-2], s[-1], s[-2]) if len(s) > 1 else s for s in matrices.shapes)
    return Weights(shapes=shapes, names=matrices.names)


# Mixture-of-experts feed-forward parts.


def expert_parameters(facts: ModelFacts) -> int:
    """Parameters of one routed expert."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    inputs = 2 * width if facts.gated_mlp else width
    return hidden * (inputs + width) + (inputs + hidden if facts.expert_bias else 0)


def routed_experts(facts: ModelFacts) -> Weights:
    """All routed experts; transformers 5 keeps them in [experts, 2 * width, hidden] and [experts, hidden, width]."""
    hidden, width = facts.hidden_size, facts.moe_intermediate_size
    inputs = (2 if facts.gated_mlp else 1) * width
    weights = experts_as_stored(facts, _experts(facts, "weight", (inputs, hidden), (hidden, width)))
    return weights + _experts(facts, "bias", (inputs,), (hidden,)) if facts.expert_bias else weights


def _experts(facts: ModelFacts, kind: str, into: Shape, out: Shape) -> Weights:
    first = "gate_up" if facts.gated_mlp else "up"
    inputs = tensor(facts.num_experts, *into, name=f"experts.{first}.{kind}")
    return inputs + tensor(facts.num_experts, *out, name=f"experts.down.{kind}")


def router_and_shared(facts: ModelFacts) -> Weights:
    """Return the router, the experts every token passes through, and their gate."""
    router = linear(facts.hidden_size, facts.num_experts, "router", bias=facts.router_bias)
    width = facts.shared_expert_intermediate_size or facts.num_shared_experts * facts.moe_intermediate_size
    shared = mlp(facts, width).inside("shared") if facts.num_shared_experts else NOTHING
    gate = tensor(1, facts.hidden_size, name="shared_gate.weight") if facts.shared_expert_gate else NOTHING
    return router + shared + gate
