"""An architecture as stacks of identical blocks, so that the time model needs no loop over layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from hardware_db.records import dataclass
from planner.cost.memo import memo_by_identity
from planner.models.facts import BlockWork, Growth, ModelFacts, ParameterCounts, TowerFacts

KINDS = frozenset(
    {"decoder", "encoder", "encoder-decoder", "speech-encoder-decoder", "vision", "vision-text", "vision-language"}
)
"""Values of `ModelFacts.kind` whose blocks `stacks` can derive."""

USUAL_MATMULS = 7
"""Weight products of a dense gated block; those beyond are experts' and cost the host a launch each."""

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
    kernels: float

    def __add__(self, other: Matmuls) -> Matmuls:
        return Matmuls(
            active=self.active + other.active,
            stored=self.stored + other.stored,
            unsplit_width=self.unsplit_width + other.unsplit_width,
            split_width=self.split_width + other.split_width,
            kernels=self.kernels + other.kernels,
        )

    def __mul__(self, factor: float) -> Matmuls:
        return Matmuls(
            active=self.active * factor,
            stored=self.stored * factor,
            unsplit_width=self.unsplit_width * factor,
            split_width=self.split_width * factor,
            kernels=self.kernels * factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """`layers` equal blocks. Widths are elements per token; `attention_width` 0 means no attention.

    `length_of` says how many tokens of a sample the stack sees: the workload's sequence, its source, `fixed_length`.
    `reads_source` marks cross-attention over the source, `window` a sliding window in `window_share` of layers;
    `relative_keys` are positions that queries and keys are compared with beside each other (DeBERTa), `dispatched`
    elements that go to experts and come back. `last_product` are the weights of a block's last product where nothing
    keeps what comes out of it. Where a trace counted them, `moved` are the bytes that kernels beside products read and
    write per token (of a step in fp32, where it says so), and `launches` the kernels that run in a block.
    """

    layers: int
    matmuls: Matmuls
    hidden: int = 0
    mlp_width: float = 0
    last_product: float = 0
    dispatched: int = 0
    attention_width: int = 0
    key_value_width: int = 0
    heads: int = 0
    causal: bool = False
    gated: bool = False
    rotary: bool = False
    root_mean_square_norm: bool = False
    norms: int = 2
    dropout: bool = False
    attention_dropout: bool = False
    composite_activation: bool = False
    reads_source: bool = False
    relative_keys: int = 0
    window: int = 0
    window_share: float = 0.0
    length_of: LengthOf = "sequence"
    fixed_length: int = 0
    moved: float = 0.0
    moved_in_fp32: bool = False
    launches: float = 0.0

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


def _product(hidden: int, width: int) -> Matmuls:
    """One product between the hidden state and a width that tensor parallelism splits."""
    return Matmuls(active=hidden * width, stored=hidden * width, unsplit_width=hidden, split_width=width, kernels=1)


def _usual_block(hidden: int, mlp_width: int) -> Matmuls:
    """Query, key, value and output of the hidden width, and an MLP of two products."""
    return _product(hidden, hidden) * 4 + _product(hidden, mlp_width) * 2


def _tower(tower: TowerFacts, length: int, *, causal: bool) -> Stack:
    return Stack(
        layers=tower.num_layers,
        matmuls=_usual_block(tower.hidden_size, tower.intermediate_size),
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
    """Return the stack of the vision side, which sees one image per sample: its patches and a class token."""
    if tower is None or not tower.image_tokens:
        return ()
    return (_tower(tower, tower.image_tokens, causal=False),)


def _attention_widths(facts: ModelFacts) -> tuple[int, int]:
    """Elements per token of queries and of keys, the mean of keys and values where those differ."""
    if facts.mla is None:
        return facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    mla = facts.mla
    width = facts.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim) // 2
    return width, width


def _attention(facts: ModelFacts) -> Matmuls:
    hidden = facts.hidden_size
    query, keys = _attention_widths(facts)
    products = _product(hidden, query) * 2 + _product(hidden, keys) * 2
    if facts.mla is None:
        return products
    mla, heads = facts.mla, facts.num_heads
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    weights = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
    weights += hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    weights += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    weights += heads * mla.v_head_dim * hidden
    return replace(products, active=weights, stored=weights)


def _shared_width(facts: ModelFacts) -> int:
    width = facts.moe_intermediate_size or facts.intermediate_size
    return facts.shared_expert_intermediate_size or facts.num_shared_experts * width


def _mlp(facts: ModelFacts) -> Matmuls:
    """Return the average MLP: experts weighted by those a token passes, plain layers by how many there are."""
    hidden, products = facts.hidden_size, 3 if facts.gated_mlp else 2
    plain = _product(hidden, facts.intermediate_size) * products
    if not facts.is_moe:
        return plain
    expert = _product(hidden, facts.moe_intermediate_size or facts.intermediate_size) * products
    # All experts' products of a kind are one grouped kernel.
    routed = replace(expert * facts.experts_per_token, stored=expert.stored * facts.num_experts, kernels=expert.kernels)
    sparse = routed + _product(hidden, _shared_width(facts)) * products + _product(hidden, facts.num_experts)
    plain_share = facts.first_k_dense / facts.num_layers
    return sparse * (1 - plain_share) + plain * plain_share


def recomputed_products(facts: ModelFacts, modules: Collection[str]) -> float:
    """Return weight elements that a token passes again in an average block, of `Configuration.recomputed` modules."""
    hidden, products = facts.hidden_size, 3 if facts.gated_mlp else 2
    width = facts.moe_intermediate_size or facts.intermediate_size
    plain_share = facts.first_k_dense / facts.num_layers if facts.is_moe else 1.0
    shared = products * hidden * _shared_width(facts) * (1 - plain_share) if facts.is_moe else 0.0
    again = 0.0
    if "mla_up_proj" in modules and facts.mla is not None:
        mla, heads = facts.mla, facts.num_heads
        again += (mla.q_lora_rank or 0) * heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        again += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if "mlp" in modules:
        again += products * hidden * facts.intermediate_size * plain_share
    if "moe" in modules and facts.is_moe:
        again += (products * width * facts.experts_per_token + facts.num_experts) * hidden * (1 - plain_share) + shared
    elif "shared_experts" in modules:
        again += shared
    return again


def _mlp_width(facts: ModelFacts) -> int:
    """Intermediate elements per token."""
    if not facts.is_moe:
        return facts.intermediate_size
    width = facts.moe_intermediate_size or facts.intermediate_size
    return width * facts.experts_per_token + _shared_width(facts)


def _last_product(facts: ModelFacts) -> float:
    """Return elements of a down projection whose output no backward needs; 0 where one does.

    That of a norm, a dropout, a scale or a router's weights needs it.
    """
    kept = facts.post_norm or facts.norms_per_layer > 2 or facts.hidden_dropout or facts.layer_scale or facts.is_moe
    return 0.0 if kept else float(facts.hidden_size * facts.intermediate_size)


def _main(facts: ModelFacts, *, layers: int, causal: bool, reads_source: bool, length_of: LengthOf) -> Stack:
    query, keys = _attention_widths(facts)
    matmuls = _attention(facts) + _mlp(facts)
    if reads_source:
        # Cross-attention: queries and outputs run over the target; keys and values over the source, a stack of its own.
        matmuls = matmuls + _product(facts.hidden_size, query) * 2
    return Stack(
        layers=layers,
        matmuls=matmuls,
        hidden=facts.hidden_size,
        mlp_width=_mlp_width(facts),
        last_product=_last_product(facts),
        dispatched=facts.hidden_size * facts.experts_per_token if facts.is_moe else 0,
        attention_width=query,
        key_value_width=keys,
        heads=facts.num_heads,
        causal=causal,
        gated=facts.gated_mlp,
        rotary=facts.position_type == "rope",
        root_mean_square_norm=facts.norm == "rmsnorm",
        norms=facts.norms_per_layer + (1 if reads_source else 0),
        dropout=facts.hidden_dropout > 0,
        attention_dropout=facts.attention_dropout > 0,
        composite_activation=facts.composite_activation,
        reads_source=reads_source,
        relative_keys=2 * facts.position_buckets,
        window=facts.sliding_window,
        window_share=facts.window_share,
        length_of=length_of,
    )


def _cross_keys_and_values(facts: ModelFacts) -> Stack:
    products = _product(facts.hidden_size, facts.num_kv_heads * facts.head_dim) * 2
    return Stack(layers=facts.decoder_layers, matmuls=products, norms=0, length_of="source")


@memo_by_identity
def stacks(facts: ModelFacts) -> tuple[Stack, ...]:
    """Return the stacks one step passes through, the one that ends in the output head last."""
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


def traced_stacks(facts: ModelFacts, counts: ParameterCounts) -> tuple[Stack, ...]:
    """Return the stack of a traced module: a sample is its token, and its blocks share the work evenly."""
    work = next(iter(facts.traced.values()))
    layers = max(sum(block.repeats for block in counts.blocks), 1)
    # A product of `active` weights is two operations for each.
    active, stored = work.operations / 2 / layers, counts.total / layers
    kernels, operands = max(work.products_launched / layers, 1.0), work.operands / layers
    return (
        Stack(
            layers=layers,
            matmuls=Matmuls(active=active, stored=stored, unsplit_width=operands, split_width=0, kernels=kernels),
            norms=1,
            length_of="fixed",
            fixed_length=1,
            moved=work.moved / layers,
            launches=work.kernels_launched / layers,
        ),
    )


def recorded_stacks(facts: ModelFacts, counts: ParameterCounts, length: int) -> tuple[Stack, ...]:
    """Return the stack of a recorded model at one length: a sample is its token, as of a traced module."""
    blocks = max(sum(work.repeats for work in facts.work if work.block), 1)
    return tuple(_recorded(work, length, counts.in_blocks / blocks) for work in facts.work)


def _recorded(work: BlockWork, length: int, parameters: float) -> Stack:
    def at(growth: Growth) -> float:
        constant, linear, square = growth
        return max(constant + linear * length + square * length**2, 0.0)

    kernels, stored = max(at(work.products_launched), 1.0), parameters if work.block else 0.0
    matmuls = Matmuls(
        active=at(work.operations) / 2, stored=stored, unsplit_width=at(work.operands), split_width=0, kernels=kernels
    )
    return Stack(
        layers=work.repeats,
        matmuls=matmuls,
        norms=1 if work.block else 0,
        length_of="fixed",
        fixed_length=1,
        moved=at(work.moved),
        moved_in_fp32=True,
        launches=max(at(work.kernels_launched), 1.0),
    )


def measured_stacks(facts: ModelFacts, counts: ParameterCounts, *, causal: bool) -> tuple[Stack, ...]:
    """Return the stack of a module known by its parameters only: every weight multiplies every token once.

    Products are taken to be as wide as those of a block with an MLP of four hidden widths. Without repeated blocks the
    whole module is one stack.
    """
    if not counts.blocks:
        whole = Matmuls(active=counts.total, stored=counts.total, unsplit_width=0, split_width=0, kernels=1)
        return (Stack(layers=1, matmuls=whole, norms=0),)
    usual = _usual_block(facts.hidden_size, 4 * facts.hidden_size)
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
