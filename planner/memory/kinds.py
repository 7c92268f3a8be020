"""Kinds: which blocks a model has, in the order they run."""

from __future__ import annotations

from planner.models.facts import ModelFacts


def block_kinds(facts: ModelFacts, *, windows: bool) -> tuple[tuple[str, int], ...]:
    """The kinds of blocks and how many of each. `windows`: whether local attention is told apart from global.

    Local and global layers alternate; here all local ones come first, which moves no peak by more than one block.
    """
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
