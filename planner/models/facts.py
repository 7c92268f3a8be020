"""The facts of an architecture that the arithmetic needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from hardware_db.records import dataclass
from planner.models.figures import Figures, on_more_ranks, share_of

# Parameter counts of a model by component.


Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A low-rank adapter beside one frozen matrix of a block: weights [rank, inputs] and [outputs, rank].

    With `magnitude` (DoRA) it has a vector of `outputs`. `name` is the matrix's, as in `BlockCount.names`.
    """

    name: str
    inputs: int
    outputs: int
    rank: int
    magnitude: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of its weights."""
        low_rank: tuple[Shape, ...] = ((self.rank, self.inputs), (self.outputs, self.rank))
        return (*low_rank, (self.outputs,)) if self.magnitude else low_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCount:
    """`repeats` consecutive transformer blocks of `parameters` each, of which `experts` belong to routed experts.

    `name` is what the blocks are: `decoder`, `encoder`, `dense` and `moe` (the two kinds of layer in a mixture of
    experts), `vision`, `text`. `largest_matrix` is the largest single weight tensor of the block, elements. Blocks that
    share one set of weights (ALBERT) are one block with `repeats` 1. `shapes` are those of one block's weights, in
    the order of use as far as it matters; empty where only their sum is known. `frozen` are the places in `shapes` of
    those that are not trained. `names` say what each is in the architecture (`planner.models.counting.count`);
    empty where that is not known. `adapters` are trained beside frozen matrices; their weights are the last `shapes`.
    """

    name: str
    repeats: int
    parameters: int
    experts: int = 0
    largest_matrix: int = 0
    shapes: tuple[Shape, ...] = ()
    frozen: tuple[int, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)
    adapters: tuple[Adapter, ...] = ()

    @property
    def trained(self) -> BlockCount:
        """The block without its frozen weights."""
        return self._of(_without(self.shapes, self.frozen)) if self.frozen else self

    @property
    def held(self) -> BlockCount:
        """Its frozen weights alone."""
        return self._of(tuple(self.shapes[index] for index in self.frozen))

    def _of(self, shapes: tuple[Shape, ...]) -> BlockCount:
        sizes = [prod(shape) for shape in shapes]
        return BlockCount(
            name=self.name,
            repeats=self.repeats,
            parameters=sum(sizes),
            experts=sum(prod(shape) for shape in shapes if len(shape) == 3) if self.experts else 0,
            largest_matrix=max(sizes, default=0),
            shapes=shapes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters of a model by component; weights that are tied count once, where they are first used.

    `embedding`: token, position and type tables and patch projections; `head`: the untied part of the output head;
    `other`: final norms, poolers, relative-position tables and the like. `outside` are the shapes of these weights,
    the embedding's first and the head's last; empty where only their sum is known. `frozen` are the places in `outside`
    of those that are not trained, `names` what they are, as in a block.
    """

    embedding: int
    blocks: tuple[BlockCount, ...]
    head: int
    other: int
    outside: tuple[Shape, ...] = ()
    frozen: tuple[int, ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def trains_all(self) -> bool:
        """True if no weight is frozen."""
        return not self.frozen and not any(block.frozen for block in self.blocks)

    @property
    def trained(self) -> ParameterCounts:
        """The counts without frozen weights: what gradients and optimizer states are of."""
        return self if self.trains_all else _part(self)[0]

    @property
    def held(self) -> ParameterCounts:
        """The counts of frozen weights alone."""
        return _part(self)[1]

    @property
    def in_blocks(self) -> int:
        """Parameters of all blocks."""
        return sum(block.parameters * block.repeats for block in self.blocks)

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return self.embedding + self.in_blocks + self.head + self.other

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block."""
        return max((block.parameters for block in self.blocks), default=0)

    @property
    def outside_blocks(self) -> int:
        """Parameters of the root unit that FSDP makes of everything outside the blocks."""
        return self.embedding + self.head + self.other


@lru_cache(maxsize=64)
def _part(counts: ParameterCounts) -> tuple[ParameterCounts, ParameterCounts]:
    """Return what is trained, and what is frozen."""
    ends = tuple(accumulate(map(prod, counts.outside)))
    tables = tuple(shape for index, shape in enumerate(counts.outside) if ends[index] <= counts.embedding)
    fixed = set(counts.frozen)
    places = [index for index in range(len(counts.outside)) if index not in fixed]
    parts = []
    for chosen, blocks in (
        (places, tuple(block.trained for block in counts.blocks)),
        (sorted(fixed), tuple(block.held for block in counts.blocks)),
    ):
        outside = tuple(counts.outside[index] for index in chosen)
        embedding = sum(prod(counts.outside[index]) for index in chosen if index < len(tables))
        other = sum(map(prod, outside)) - embedding
        parts.append(ParameterCounts(embedding=embedding, blocks=blocks, head=0, other=other, outside=outside))
    return parts[0], parts[1]


def _without(shapes: tuple[Shape, ...], places: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(shape for index, shape in enumerate(shapes) if index not in places)


# transformers 5 has no torch.nn.functional.scaled_dot_product_attention path for these, and falls back to eager.
_EAGER_ONLY = frozenset({"gptj", "codegen", "bloom", "mpt", "gemma2", "gpt_oss", "deberta-v2"})
# The Hub's build of FlashAttention that transformers 5.23 names for it takes sinks
# (`_compatible_flash_implementations` of modeling_gpt_oss.py).
_FUSED_BY_FLASH = frozenset({"gpt_oss"})
# transformers writes these GELUs out in Python: every step of the formula is a kernel and a tensor of its own.
_LOCAL_SHARE = {
    "2 local : 1 global": 2 / 3,
    "5 local : 1 global": 5 / 6,
    "alternate local/global": 1 / 2,
    "alternate global/local": 1 / 2,
}
_COMPOSITE_ACTIVATIONS = frozenset({"gelu_new", "gelu_fast", "quick_gelu"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaFacts:
    """Multi-head latent attention (DeepSeek-V2/V3): ranks and head widths."""

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerFacts:
    """The second tower of a two-tower model: CLIP's text side, the vision side of a vision-language model.

    `pooling_head`: SigLIP's attention pooling, which Gemma 3's checkpoints leave out.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int = 0
    max_position_embeddings: int = 0
    image_size: int = 0
    patch_size: int = 0
    model_type: str = ""
    mm_tokens_per_image: int = 0
    pooling_head: bool = False

    @property
    def image_tokens(self) -> int:
        """Patches of one image and the class token; 0 for a tower that sees no image."""
        return (self.image_size // self.patch_size) ** 2 + 1 if self.patch_size else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMoment:
    """Bytes alive at one moment of the backward pass beside weights and finished gradients.

    `fixed` are there whatever the batch, `per_sample` for each sample; `gradients` are the elements of the weights
    whose gradient is finished.
    """

    fixed: float
    per_sample: float
    gradients: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedActivations:
    """Bytes per sample that a traced module needs beside its parameters and gradients.

    `kept` when the forward pass with the loss ends, `forward` and `backward` at those passes' peaks; `block`,
    `boundary` and `products` of one repeated block: what it keeps, its output, the outputs of its linear layers.
    `moments` are those of the whole backward pass, in its order, that can be its peak; empty where they depend on the
    batch. The work of a forward pass: `operations` of its products and convolutions, elements of their `operands`, and
    bytes `moved` by all other kernels, all per sample; `products_launched` of the `kernels_launched`. `buffers` are the
    bytes of the module's own. `figures` are those of its blocks and what is around them; None where it has no blocks,
    or runs them in another way. `parts` are the same on one of the ranks that share it, by tp, cp, ep and
    whether tp ranks split sequences.
    """

    kept: float
    forward: float
    backward: float
    block: float
    boundary: float
    products: float
    operations: float = 0.0
    operands: float = 0.0
    moved: float = 0.0
    products_launched: int = 0
    kernels_launched: int = 0
    moments: tuple[TracedMoment, ...] = ()
    buffers: float = 0.0
    figures: Figures | None = None
    parts: Mapping[tuple[int, int, int, bool], TracedActivations] = field(default_factory=dict)

    def of(self, *, tp: int, cp: int, ep: int = 1, splits_sequences: bool = False) -> TracedActivations:
        """Return the trace of a rank of such degrees, or one like that of two ranks, or the whole's."""
        two, degrees = self.parts.get((2, 1, 1, False)), (tp, cp, ep, splits_sequences)
        if degrees in self.parts or tp < 2 or cp > 1 or two is None:
            return self.parts.get(degrees, self)
        sizes: dict[str, Any] = {name: share_of(getattr(self, name), getattr(two, name), tp) for name in _SIZES}
        smaller = sizes["kept"] / two.kept if two.kept else 1.0
        moments = tuple(
            replace(moment, per_sample=smaller * moment.per_sample, gradients=round(moment.gradients * 2 / tp))
            for moment in two.moments
        )
        figures = on_more_ranks(self.figures, two.figures, tp) if self.figures and two.figures else None
        return replace(two, **sizes, moments=moments, figures=figures)


_SIZES = ("kept", "forward", "backward", "block", "boundary", "products")


Growth = tuple[float, float, float]
"""A constant, and the factors of a sample's length and of its square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWork:
    """The forward pass of one of `repeats` like blocks, or, without a name, of all that is in no block.

    `operations` of products and convolutions, elements of their `operands`, and bytes in fp32 that all other kernels
    have `moved`, all for a sample; `products_launched` of the `kernels_launched` for a batch.
    """

    block: str
    repeats: int
    operations: Growth
    operands: Growth
    moved: Growth
    products_launched: Growth
    kernels_launched: Growth


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """An architecture in numbers; field names are those of the catalogue `catalogue.yaml`.

    `parameters` is the exact count of the architecture built (tied weights once); `active_parameters` those one token
    passes through. For encoder-decoders `num_layers` is the encoder's depth. `block_class` names the repeated module
    as transformers calls it (`OPTDecoderLayer`), which FSDP wraps and checkpointing recomputes; where two towers have
    blocks of their own, both names with a comma between (`WhisperEncoderLayer,WhisperDecoderLayer`). `first_k_dense`
    counts a mixture of experts' layers that have a plain MLP, wherever they sit. `decoder_intermediate_size` is 0
    where it is the encoder's. `fused_qkv` and `fused_gate_up`: one weight holds all of these projections. The dropouts
    are the probabilities active in training by default. `measured_counts` is set where the counts come from a real
    module that these figures do not describe: kind `custom`, or a transformers model with something added.
    `rotary_base` is 0 where it was not read; no cost depends on it, and Megatron's arguments need it. `rotary_scaling`
    is transformers' `rope_type` (`llama3`, `yarn`) where there is a base and positions are scaled; empty where not.
    `splits_sequences`: sequence parallelism knows where the model gathers its tokens; transformers 5.23 has no
    `base_model_tp_plan` of the others, whose layers are split by rule. `traced`
    maps `fp32`, `autocast` and `pure` to what a trace of the module found in that precision. `recorded_as` names the
    form of a model whose blocks were recorded as they are, with their `work`; empty for one that figures describe.
    """

    name: str
    family: str
    model_type: str
    architecture: str
    kind: str
    parameters: int
    active_parameters: int
    block_class: str = ""
    aliases: tuple[str, ...] = ()
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    decoder_intermediate_size: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    encoder_layers: int = 0
    decoder_layers: int = 0
    tie_word_embeddings: bool = True
    fuses_attention: bool = False
    gated_mlp: bool = False
    activation: str = "gelu"
    norm: str = "layernorm"
    norm_bias: bool = True
    norms_per_layer: int = 2
    final_norm: bool = True
    qk_norm: bool | str = False
    post_norm: bool = False
    parallel_residual: bool = False
    position_type: str = "learned"
    learned_positions: bool = False
    position_offset: int = 0
    type_vocab_size: int = 0
    rotary_pct: float = 1.0
    rotary_base: int = 0
    rotary_scaling: str = ""
    rotary_dim: int = 0
    sliding_window: int = 0
    sliding_window_pattern: str = ""
    relative_attention_num_buckets: int = 0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    qkv_bias: bool = False
    k_bias: bool = True
    attn_out_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    embedding_layernorm: bool = False
    embedding_size: int = 0
    word_embed_proj_dim: int = 0
    mlm_transform: bool = False
    pooler: bool = False
    shared_layers: bool = False
    share_att_key: bool = False
    position_buckets: int = 0
    layer_scale: bool = False
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int = 0
    attention_sinks: bool = False
    splits_sequences: bool = True
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_groups: int = 0
    groups_per_token: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    first_k_dense: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    num_nextn_predict_layers: int = 0
    mla: MlaFacts | None = None
    image_size: int = 0
    patch_size: int = 0
    num_channels: int = 0
    num_labels: int = 0
    num_mel_bins: int = 0
    max_source_positions: int = 0
    max_target_positions: int = 0
    projection_dim: int = 0
    text: TowerFacts | None = None
    vision: TowerFacts | None = None
    dtype: str = ""
    remote_code: bool = False
    note: str = ""
    measured_counts: ParameterCounts | None = None
    recorded_as: str = ""
    work: tuple[BlockWork, ...] = ()
    traced: Mapping[str, TracedActivations] = field(default_factory=dict, compare=False)

    def __hash__(self) -> int:
        # A plan is looked up by its model hundreds of times in a search, and eighty fields take their time.
        return hash((self.name, self.parameters))

    @property
    def total_layers(self) -> int:
        """Transformer blocks over all towers that a step passes through."""
        if self.kind.endswith("encoder-decoder"):
            return (self.encoder_layers or self.num_layers) + self.decoder_layers
        towers = (tower.num_layers for tower in (self.text, self.vision) if tower is not None)
        return self.num_layers + sum(towers)

    @property
    def is_moe(self) -> bool:
        """True if blocks have experts."""
        return self.num_experts > 1

    @property
    def eager_only(self) -> bool:
        """True if torch's own attention is not what the model runs; FlashAttention fuses that of some."""
        return self.model_type in _EAGER_ONLY and not self.fuses_attention

    @property
    def fused_by_flash(self) -> bool:
        """True if FlashAttention fuses what torch's own attention does not."""
        return self.eager_only and self.model_type in _FUSED_BY_FLASH

    def runs_eager(self, attention: str) -> bool:
        """Return whether attention of this name runs unfused: as it says, or because the model has no other."""
        if self.kind == "diffusion":
            return False  # diffusers calls torch's attention function, whatever is asked for
        return attention == "eager" or (self.eager_only and not (attention == "flash" and self.fused_by_flash))

    @property
    def window_share(self) -> float:
        """Share of layers whose attention is local, where `sliding_window` is set: all of them without a pattern."""
        return _LOCAL_SHARE.get(self.sliding_window_pattern, 1.0)

    @property
    def composite_activation(self) -> bool:
        """True if the activation is several kernels in Python rather than one of torch's."""
        return self.activation in _COMPOSITE_ACTIVATIONS
