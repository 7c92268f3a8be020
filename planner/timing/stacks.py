"""An architecture as stacks of identical blocks: what the time model needs, without a loop over layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.models.facts import ModelFacts, TowerFacts
from planner.models.parameter_counts import ParameterCounts
from planner.timing.memo import memo_by_identity

_LOCAL_SHARE = {
    "2 local : 1 global": 2 / 3,
    "5 local : 1 global": 5 / 6,
    "alternate local/global": 1 / 2,
    "alternate global/local": 1 / 2,
}
"""Share of layers whose attention is local, by `ModelFacts.sliding_window_pattern`; all of them without a pattern."""

KINDS = frozenset(
    {"decoder", "encoder", "encoder-decoder", "speech-encoder-decoder", "vision", "vision-text", "vision-language"}
)
"""Values of `ModelFacts.kind` whose blocks `stacks` can derive."""

LengthOf = Literal["sequence", "source", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmuls:
    """The weight products of one block, summed, per token.

    `active` and `stored` are weight elements that a token passes and that are read (all experts); `unsplit_width` and
    `split_width` the input and output elements per token, of which tensor parallelism divides the second; `kernels` the
    products launched.
    """

    active: float
    stored: float
    unsplit_width: float
    split_width: float
    kernels: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """`layers` equal blocks. Widths are elements per token; `attention_width` 0 means no attention.

    `length_of` says how many tokens of a sample the stack sees: the workload's sequence, its source, `fixed_length`.
    `reads_source` marks cross-attention over the source, `window` a sliding window in `window_share` of layers.
    """

    layers: int
    matmuls: Matmuls
    hidden: int = 0
    mlp_width: float = 0
    attention_width: int = 0
    key_value_width: int = 0
    heads: int = 0
    causal: bool = False
    gated: bool = False
    rotary: bool = False
    root_mean_square_norm: bool = False
    norms: int = 2
    dropout: bool = False
    composite_activation: bool = False
    reads_source: bool = False
    window: int = 0
    window_share: float = 0.0
    length_of: LengthOf = "sequence"
    fixed_length: int = 0

    def length(self, sequence: int, source: int) -> int:
        """Tokens of one sample that this stack sees."""
        if self.length_of == "fixed":
            return self.fixed_length
        return source if self.length_of == "source" else sequence

    def context(self, length: int) -> float:
        """Keys that a query multiplies with, averaged over layers and positions, before the causal halving."""
        if not self.window or self.window >= length:
            return length
        return (1 - self.window_share) * length + self.window_share * min(length, 2 * self.window)


def _dense(hidden: int, attention_width: int, key_value_width: int, mlp_width: int, gated: bool) -> Matmuls:
    """Query, key, value, output and two or three MLP products."""
    ups = 2 if gated else 1
    attention = 2 * hidden * (attention_width + key_value_width)
    mlp = (ups + 1) * hidden * mlp_width
    return Matmuls(
        active=attention + mlp,
        stored=attention + mlp,
        unsplit_width=(3 + 1 + ups + 1) * hidden,
        split_width=2 * attention_width + 2 * key_value_width + (ups + 1) * mlp_width,
        kernels=5 + ups,
    )


def _tower(tower: TowerFacts, length: int, *, causal: bool) -> Stack:
    return Stack(
        layers=tower.num_layers,
        matmuls=_dense(tower.hidden_size, tower.hidden_size, tower.hidden_size, tower.intermediate_size, False),
        hidden=tower.hidden_size,
        mlp_width=tower.intermediate_size,
        attention_width=tower.hidden_size,
        key_value_width=tower.hidden_size,
        heads=tower.num_heads,
        causal=causal,
        length_of="fixed" if length else "sequence",
        fixed_length=length,
    )


def _image_tower(tower: TowerFacts | None) -> tuple[Stack, ...]:
    """The vision side, which sees one image per sample: its patches and a class token."""
    if tower is None or not tower.patch_size:
        return ()
    return (_tower(tower, (tower.image_size // tower.patch_size) ** 2 + 1, causal=False),)


def _attention_parameters(facts: ModelFacts) -> tuple[int, int, int]:
    """Weights of the attention products of one layer, then the widths of queries and of keys with values."""
    if facts.mla is not None:
        mla = facts.mla
        query = facts.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        value = facts.num_heads * mla.v_head_dim
        rank = mla.q_lora_rank
        weights = facts.hidden_size * query if rank is None else rank * (facts.hidden_size + query)
        weights += facts.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        weights += mla.kv_lora_rank * facts.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return weights + value * facts.hidden_size, (query + value) // 2, (query + value) // 2
    query = facts.num_heads * facts.head_dim
    keys = facts.num_kv_heads * facts.head_dim
    return 2 * facts.hidden_size * (query + keys), query, keys


def _block_matmuls(facts: ModelFacts) -> Matmuls:
    """The average block of a decoder: experts weighted by those a token passes, leading dense layers included."""
    attention, query, keys = _attention_parameters(facts)
    dense = _dense(facts.hidden_size, query, keys, facts.intermediate_size, facts.gated_mlp)
    products = 3 if facts.gated_mlp else 2
    dense_mlp = products * facts.hidden_size * facts.intermediate_size
    if not facts.is_moe:
        return Matmuls(
            active=attention + dense_mlp,
            stored=attention + dense_mlp,
            unsplit_width=dense.unsplit_width,
            split_width=dense.split_width,
            kernels=dense.kernels,
        )
    width = facts.moe_intermediate_size or facts.intermediate_size
    expert = products * facts.hidden_size * width
    shared = products * facts.hidden_size * (facts.shared_expert_intermediate_size or facts.num_shared_experts * width)
    sparse_share = 1 - facts.first_k_dense / facts.num_layers
    router = facts.hidden_size * facts.num_experts
    per_token = facts.experts_per_token * expert + shared + router
    stored = facts.num_experts * expert + shared + router
    return Matmuls(
        active=attention + sparse_share * per_token + (1 - sparse_share) * dense_mlp,
        stored=attention + sparse_share * stored + (1 - sparse_share) * dense_mlp,
        unsplit_width=4 * facts.hidden_size + products * facts.hidden_size * facts.experts_per_token,
        split_width=2 * (query + keys) + products * width * facts.experts_per_token,
        kernels=round(4 + products * facts.num_experts * sparse_share),
    )


def _main(facts: ModelFacts, *, layers: int, causal: bool, reads_source: bool, length_of: LengthOf) -> Stack:
    _, query, keys = _attention_parameters(facts)
    active_width = facts.intermediate_size
    if facts.is_moe:
        width = facts.moe_intermediate_size or facts.intermediate_size
        active_width = width * facts.experts_per_token + (
            facts.shared_expert_intermediate_size or facts.num_shared_experts * width
        )
    matmuls = _block_matmuls(facts)
    if reads_source:
        # Cross-attention: queries and outputs run over the target; keys and values over the source, a stack of its own.
        matmuls = Matmuls(
            active=matmuls.active + 2 * facts.hidden_size * query,
            stored=matmuls.stored + 2 * facts.hidden_size * query,
            unsplit_width=matmuls.unsplit_width + 2 * facts.hidden_size,
            split_width=matmuls.split_width + 2 * query,
            kernels=matmuls.kernels + 2,
        )
    return Stack(
        layers=layers,
        matmuls=matmuls,
        hidden=facts.hidden_size,
        mlp_width=active_width,
        attention_width=query,
        key_value_width=keys,
        heads=facts.num_heads,
        causal=causal,
        gated=facts.gated_mlp,
        rotary=facts.position_type == "rope",
        root_mean_square_norm=facts.norm == "rmsnorm",
        norms=facts.norms_per_layer + (1 if reads_source else 0),
        dropout=facts.hidden_dropout > 0,
        composite_activation=facts.activation in ("gelu_new", "gelu_fast", "quick_gelu"),
        reads_source=reads_source,
        window=facts.sliding_window,
        window_share=_LOCAL_SHARE.get(facts.sliding_window_pattern, 1.0),
        length_of=length_of,
    )


def _cross_keys_and_values(facts: ModelFacts) -> Stack:
    keys = facts.num_kv_heads * facts.head_dim
    weights = 2 * facts.hidden_size * keys
    products = Matmuls(
        active=weights, stored=weights, unsplit_width=2 * facts.hidden_size, split_width=2 * keys, kernels=2
    )
    return Stack(layers=facts.decoder_layers, matmuls=products, norms=0, length_of="source")


@memo_by_identity
def stacks(facts: ModelFacts) -> tuple[Stack, ...]:
    """The stacks one step passes through, the one that ends in the output head last."""
    if facts.kind.endswith("encoder-decoder"):
        encoder_layers = facts.encoder_layers or facts.num_layers
        decoder = replace(facts, intermediate_size=facts.decoder_intermediate_size or facts.intermediate_size)
        return (
            _main(facts, layers=encoder_layers, causal=False, reads_source=False, length_of="source"),
            _cross_keys_and_values(facts),
            _main(decoder, layers=facts.decoder_layers, causal=True, reads_source=True, length_of="sequence"),
        )
    images = _image_tower(facts.vision)
    if facts.kind == "vision-text":
        return (*images, *((_tower(facts.text, 0, causal=True),) if facts.text else ()))
    main = _main(
        facts,
        layers=facts.num_layers,
        causal=facts.kind in ("decoder", "vision-language"),
        reads_source=False,
        length_of="sequence",
    )
    return (*images, main)


def measured_stacks(facts: ModelFacts, counts: ParameterCounts, *, causal: bool) -> tuple[Stack, ...]:
    """A module known by its parameters only: every weight of a block multiplies every token once.

    Products are taken to be as wide as those of a block with an MLP of four hidden widths. Without repeated blocks the
    whole module is one stack.
    """
    if not counts.blocks:
        whole = Matmuls(active=counts.total, stored=counts.total, unsplit_width=0, split_width=0, kernels=1)
        return (Stack(layers=1, matmuls=whole, norms=0),)
    usual = _dense(facts.hidden_size, facts.hidden_size, facts.hidden_size, 4 * facts.hidden_size, False)
    return tuple(
        Stack(
            layers=block.repeats,
            matmuls=replace(usual, active=block.parameters, stored=block.parameters),
            hidden=facts.hidden_size,
            mlp_width=4 * facts.hidden_size,
            attention_width=facts.hidden_size if facts.num_heads else 0,
            key_value_width=facts.hidden_size if facts.num_heads else 0,
            heads=facts.num_heads,
            causal=causal,
        )
        for block in counts.blocks
    )
