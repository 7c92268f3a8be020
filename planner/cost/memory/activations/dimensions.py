"""Dimensions: the symbols in which memory forms are written, and what each stands for in a model.

| symbol | meaning | symbol | meaning |
|---|---|---|---|
| b | samples of a micro-batch | s | positions of the (last) decoder or only stack |
| t | positions of an encoder, or of an image | h | hidden width |
| a, g, d | attention heads, key heads, head width | r | repeats: query heads per key head |
| f, F | feed-forward width, a decoder's own | V, P | vocabulary, positions |
| R | rotated part of a head | w | window of local attention |
| e, j | embedding width, projected word width | E, k, m, x | experts, experts per token, their width, the shared |
| ql, kl, n, o, v | MLA: query and key ranks, unrotated, rotated and value widths | | |
| H, A, D, G | second tower: width, heads, head width, feed-forward width | M | mel bins |
| C, I, p, y | channels, image and patch size, image tokens in the text | c | labels or projection width |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from planner.models.facts import ModelFacts

Dimensions: TypeAlias = Mapping[str, float]


def model_dimensions(facts: ModelFacts, tp: int = 1) -> dict[str, float]:
    """Return the model's own symbols, with heads, feed-forward widths and the vocabulary divided by `tp`.

    Where there are fewer key heads than ranks each has a whole one.
    """
    rotated = facts.rotary_dim or int(facts.head_dim * facts.rotary_pct)
    values: dict[str, float] = {
        "h": facts.hidden_size,
        "a": max(facts.num_heads / tp, 1),
        "g": max(facts.num_kv_heads / tp, 1),
        "d": facts.head_dim,
        "r": max(facts.num_heads / tp, 1) / max(facts.num_kv_heads / tp, 1),
        "f": facts.intermediate_size / tp,
        "F": (facts.decoder_intermediate_size or facts.intermediate_size) / tp,
        "V": facts.vocab_size / tp,
        "P": facts.max_position_embeddings,
        "R": rotated,
        "w": facts.sliding_window,
        "e": facts.embedding_size or facts.hidden_size,
        "j": facts.word_embed_proj_dim or facts.hidden_size,
        "E": facts.num_experts,
        "k": facts.experts_per_token,
        "m": (facts.moe_intermediate_size or facts.intermediate_size) / tp,
        "x": shared_width(facts) / tp,
        "M": facts.num_mel_bins,
        "C": facts.num_channels,
        "p": facts.patch_size,
        "I": facts.image_size or (facts.vision.image_size if facts.vision else 0),
        "c": facts.projection_dim or facts.num_labels,
    }
    if facts.mla is not None:
        mla = facts.mla
        values |= {"ql": mla.q_lora_rank or 0, "kl": mla.kv_lora_rank, "n": mla.qk_nope_head_dim}
        values |= {"o": mla.qk_rope_head_dim, "v": mla.v_head_dim}
    tower = facts.vision if facts.kind == "vision-language" else facts.text
    if tower is not None:
        values |= {"H": tower.hidden_size, "A": max(tower.num_heads / tp, 1), "G": tower.intermediate_size / tp}
        values |= {"D": tower.hidden_size / tower.num_heads, "y": tower.mm_tokens_per_image}
    return values


def shared_width(facts: ModelFacts) -> int:
    """Width of what all tokens pass beside the routed experts."""
    width = facts.moe_intermediate_size or facts.intermediate_size
    return facts.shared_expert_intermediate_size or facts.num_shared_experts * width


# The kinds of blocks of a model, in the order they run.


def block_kinds(facts: ModelFacts, *, windows: bool) -> tuple[tuple[str, int], ...]:
    """Return the kinds of blocks and how many of each. `windows`: whether local attention is told apart from global.

    Local and global layers alternate; here all local ones come first, which moves no peak by more than one block.
    """
    if facts.recorded_as:
        return tuple((work.block, work.repeats) for work in facts.work if work.block)
    if facts.kind.endswith("encoder-decoder"):
        return ("encoder", facts.encoder_layers or facts.num_layers), ("decoder", facts.decoder_layers)
    if facts.kind == "vision-text" and facts.text is not None and facts.vision is not None:
        return ("image", facts.vision.num_layers), ("text", facts.text.num_layers)
    layers = _layers(facts, windows=windows)
    if facts.kind == "vision-language" and facts.vision is not None:
        return ("image", facts.vision.num_layers), *layers
    return layers


def _layers(facts: ModelFacts, *, windows: bool) -> tuple[tuple[str, int], ...]:
    if windows and facts.sliding_window and facts.window_share < 1:
        local = round(facts.num_layers * facts.window_share)
        return ("local", local), ("global", facts.num_layers - local)
    if facts.is_moe and facts.first_k_dense:
        return ("dense", facts.first_k_dense), ("expert", facts.num_layers - facts.first_k_dense)
    return (("block", facts.num_layers),)
