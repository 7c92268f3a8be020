"""Symbols: a small model whose dimensions are all different, so that a storage's shape tells what it is made of.

A traced tensor of shape (6, 211, 1760) can only be samples x positions x hidden width. Sums that implementations make,
such as a fused projection of queries, keys and values, are known as sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.cost.memory.activations.dimensions import model_dimensions
from planner.cost.memory.activations.form import Polynomial, multiply, scale, value
from planner.models.facts import MlaFacts, ModelFacts, TowerFacts

SAMPLES, LENGTH, SOURCE, WINDOW = 6, 211, 307, 67
LARGEST_CONSTANT = 64
"""A dimension up to here that no symbol explains is a constant of the implementation (buckets, pairs, kernels)."""

_HEADS, _GROUPS, _HEAD_DIM = 40, 8, 56
_HIDDEN_ITSELF = _HEADS * 44
_VOCABULARY, _POSITIONS = 260_003, 1531
_SIDE, _PATCH = 14, 19
_WIDE = 4099
"""A window that no sample fills."""


class Undecodable(Exception):
    """A storage has a dimension that no symbol or sum of symbols explains."""


def small(facts: ModelFacts, depth: int, *, windows: bool = False) -> ModelFacts:
    """Return the same structure with every dimension small and unlike the others, and `depth` blocks a stack."""
    groups = 1 if facts.num_kv_heads == 1 else _HEADS if facts.num_kv_heads == facts.num_heads else _GROUPS
    square = facts.num_heads * facts.head_dim == facts.hidden_size or facts.mla is not None
    own_head_dim = facts.model_type in _FREE_HEAD_DIM
    hidden = _HIDDEN_ITSELF if own_head_dim or not square else _HEADS * _HEAD_DIM
    changed = replace(
        facts,
        hidden_size=hidden,
        num_heads=_HEADS,
        num_kv_heads=groups,
        head_dim=_HEAD_DIM,
        intermediate_size=_width(facts, hidden),
        decoder_intermediate_size=0,
        vocab_size=_VOCABULARY if facts.vocab_size else 0,
        max_position_embeddings=_POSITIONS,
        rotary_dim=26 if facts.rotary_dim else 0,
        sliding_window=(WINDOW if windows else _WIDE) if facts.sliding_window else 0,
        num_layers=2 * depth if facts.is_moe and facts.first_k_dense else depth,
        encoder_layers=depth if facts.encoder_layers else 0,
        decoder_layers=depth if facts.decoder_layers else 0,
        embedding_size=_beside(facts.embedding_size, facts.hidden_size, (131, hidden)),
        word_embed_proj_dim=_beside(facts.word_embed_proj_dim, facts.hidden_size, (173, hidden)),
        max_source_positions=SOURCE if facts.max_source_positions else 0,
        max_target_positions=_POSITIONS if facts.max_target_positions else 0,
        num_mel_bins=83 if facts.num_mel_bins else 0,
        projection_dim=467 if facts.projection_dim else 0,
        measured_counts=None,
        traced={},
    )
    return _towers(_experts(_latent(changed)))


# Families whose configs set the width of a head beside the hidden width.
_FREE_HEAD_DIM = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text"),
        *("cohere", "glm", "glm4_moe", "granite", "smollm3", "olmo", "olmo2", "gpt_oss", "starcoder2", "baichuan"),
        *("internlm2", "internlm3", "chatglm", "t5", "mt5"),
    }
)


def _beside(width: int, hidden: int, small: tuple[int, int]) -> int:
    """Return a width that some models have besides the hidden one: absent, its own, or the hidden one."""
    own, same = small
    return 0 if width == 0 else same if width == hidden else own


def _width(facts: ModelFacts, hidden: int) -> int:
    if facts.model_type in ("bloom", "mpt"):
        return 4 * hidden
    if facts.model_type == "dinov2":
        return -(-int(int(hidden * 4) * 2 / 3) // 8) * 8 if facts.gated_mlp else 4 * hidden
    return 1112


def _latent(facts: ModelFacts) -> ModelFacts:
    if facts.mla is None:
        return facts
    mla = MlaFacts(
        q_lora_rank=272 if facts.mla.q_lora_rank else None,
        kv_lora_rank=200,
        qk_nope_head_dim=40,
        qk_rope_head_dim=24,
        v_head_dim=48,
    )
    return replace(facts, mla=mla, head_dim=64, num_kv_heads=facts.num_heads)


def _experts(facts: ModelFacts) -> ModelFacts:
    if not facts.is_moe:
        return facts
    shared = facts.shared_expert_intermediate_size
    return replace(
        facts,
        num_experts=32,
        experts_per_token=9 if facts.experts_per_token > 1 else 1,
        moe_intermediate_size=616 if facts.moe_intermediate_size else 0,
        shared_expert_intermediate_size=744 if shared else 0,
        first_k_dense=facts.num_layers // 2 if facts.first_k_dense else 0,
    )


def _towers(facts: ModelFacts) -> ModelFacts:
    if facts.image_size and facts.patch_size:
        facts = replace(facts, image_size=_SIDE * _PATCH, patch_size=_PATCH)
    if facts.kind == "vision":
        facts = replace(facts, max_position_embeddings=_SIDE * _SIDE + 1)
    if facts.kind == "vision-language" and facts.vision is not None:
        return replace(facts, vision=_tower(facts.vision, facts.num_layers))
    if facts.text is None or facts.vision is None:
        return facts
    vision = replace(
        facts.vision,
        hidden_size=facts.hidden_size,
        num_heads=facts.num_heads,
        intermediate_size=facts.intermediate_size,
        num_layers=facts.num_layers,
        image_size=_SIDE * _PATCH,
        patch_size=_PATCH,
    )
    return replace(facts, vision=vision, text=_tower(facts.text, facts.num_layers))


def _tower(tower: TowerFacts, depth: int) -> TowerFacts:
    """Widths that the first tower does not have."""
    tower = replace(tower, hidden_size=12 * 72, num_heads=12, intermediate_size=1423, num_layers=depth)
    if tower.patch_size:
        return replace(tower, image_size=_SIDE * _PATCH, patch_size=_PATCH, mm_tokens_per_image=49)
    return replace(tower, vocab_size=_VOCABULARY, max_position_embeddings=_POSITIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Turns shapes into polynomials; `sums` maps a dimension to what it stands for."""

    sums: Mapping[int, Polynomial]

    def elements(self, shape: tuple[int, ...]) -> Polynomial:
        """Return the number of elements of a tensor of this shape.

        Raises:
            Undecodable: a dimension above `LARGEST_CONSTANT` is not known.
        """
        total: Polynomial = {"": 1.0}
        for size in shape:
            if size in self.sums:
                total = multiply(total, self.sums[size])
            elif size <= LARGEST_CONSTANT:
                total = scale(total, size)
            else:
                raise Undecodable(f"dimension {size} of a tensor of shape {shape} is no known sum or product")
        return total


def decoder_of(facts: ModelFacts, sizes: Mapping[str, float]) -> Decoder:
    """Return a decoder for a small model; `sizes` are the batch's own symbols (b, s, t)."""
    values = {name: int(size) for name, size in (dict(sizes) | model_dimensions(facts)).items() if size > 1}
    for alias, plain in _ALIASES.items():
        if values.get(alias) == values.get(plain):
            values.pop(alias, None)
    sizes_by_value: dict[int, Polynomial] = {}
    if facts.position_buckets:
        sizes_by_value[2 * facts.position_buckets] = {"": 2.0 * facts.position_buckets}
    for expression in itertools.chain.from_iterable(_expressions(values)):
        size = value(expression, values)
        if size == int(size) and size > 1:
            sizes_by_value.setdefault(int(size), expression)
    for name, multiple in itertools.product(("s", "t", "d", "D"), _PADDINGS):
        if name in values:
            sizes_by_value.setdefault(-(-values[name] // multiple) * multiple, {name: 1.0})
    return Decoder(sums=sizes_by_value)


_PADDINGS = (8, 32, 64, 128)
"""Attention kernels pad rows, masks and widths to multiples of these; the sizes of real models mostly are such."""
_ALIASES = {"e": "h", "j": "h", "F": "f", "m": "f", "R": "d", "t": "s", "g": "a", "r": "a"}
"""Symbols that mean another one where their values are the same."""


def _expressions(symbols: Mapping[str, int]) -> list[list[Polynomial]]:
    """From the plainest to the strangest; the first that gives a size is taken for it."""
    singles: list[Polynomial] = [{name: 1.0} for name in symbols]
    widths = [name for name in ("h", "f", "m", "x", "F", "G", "H", "R", "s", "t", "d", "n", "o") if name in symbols]
    multiples: list[Polynomial] = [{name: factor} for factor in (2.0, 3.0, 4.0, 0.5) for name in widths]
    products: list[Polynomial] = [{" ".join(sorted(pair)): 1.0} for pair in _PRODUCTS if set(pair) <= symbols.keys()]
    sums = [total for total in _SUMS if {name for term in total for name in term.split()} <= symbols.keys()]
    shifts: list[Polynomial] = [{name: 1.0, "": shift} for shift in (-1.0, 1.0, 2.0) for name in ("s", "t", "P")]
    shifts = [shift for shift in shifts if set(shift) - {""} <= symbols.keys()]
    samples: list[Polynomial] = [multiply({"b": 1.0}, shift) for shift in shifts] if "b" in symbols else []
    return [singles, products, multiples, sums, shifts, samples]


_PRODUCTS = [
    *itertools.chain(
        (("b", "s"), ("b", "t"), ("a", "d"), ("d", "g"), ("b", "a"), ("b", "g"), ("b", "A"), ("A", "D")),
        (("b", "s", "k"), ("s", "k"), ("b", "a", "s"), ("b", "y"), ("k", "m"), ("E", "m"), ("E", "h")),
        (("a", "v"), ("a", "n"), ("a", "o"), ("b", "s", "a"), ("b", "k"), ("b", "E")),
        (("C", "p", "p"), ("b", "s", "g"), ("a", "s"), ("a", "t"), ("b", "w"), ("E", "h"), ("E", "f")),
    )
]
_SUMS: list[Polynomial] = [
    {"a d": 1.0, "d g": 2.0},
    {"a d": 3.0},
    {"a d": 2.0},
    {"d g": 2.0},
    {"h": 1.0, "d": 2.0},
    {"a d": 1.0, "d": 2.0},
    {"d": 1.0, "R": -1.0},
    {"kl": 1.0, "o": 1.0},
    {"n": 1.0, "v": 1.0},
    {"a n": 1.0, "a v": 1.0},
    {"n": 1.0, "o": 1.0},
    {"a n": 1.0, "a o": 1.0},
    {"t": 2.0},
    {"b s k": 2.0},
    {"b s": 2.0},
    {"h": 0.75},
    {"m": 2.0},
    {"s": 2.0, "": -1.0},
    {"R": 0.5},
    {"d": 0.5},
]
