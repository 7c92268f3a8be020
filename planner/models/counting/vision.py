"""Image encoders and models with two towers: ViT, DINOv2, CLIP, Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from planner.models.counting.text import count_decoder
from planner.models.counting.weights import (
    NOTHING,
    Weights,
    attention,
    block_count,
    counted,
    linear,
    mlp,
    norm,
    norms,
    tensor,
    vector,
)
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts, TowerFacts


def count_vision(facts: ModelFacts) -> ParameterCounts:
    """ViT and DINOv2: class token, patches, blocks, final norm, and a pooler or classifier where there is one."""
    hidden = facts.hidden_size
    tokens = tensor(1, 1, hidden)
    if facts.layer_scale:
        tokens += tensor(1, hidden)  # DINOv2's mask token
    positions = tensor(1, _patches(facts.image_size, facts.patch_size) + 1, hidden)
    pooler = linear(hidden, hidden, bias=True) if facts.pooler else NOTHING
    classifier = linear(_classifier_inputs(facts), facts.num_labels, bias=True) if _classifies(facts) else NOTHING
    return counted(
        embedding=_patch_projection(facts, hidden, facts.patch_size) + vector(hidden) + tokens + positions,
        blocks=(_vision_block(facts, "vision", facts.num_layers),),
        head=classifier,
        other=norm(facts) + pooler,
    )


def count_vision_text(facts: ModelFacts) -> ParameterCounts:
    """CLIP: two towers, two projections without bias, and the logit scale.

    Raises:
        ValueError: the facts lack a tower.
    """
    if facts.text is None or facts.vision is None:
        raise ValueError(f"{facts.name}: a vision-text model needs both towers")
    text, vision = _as_tower(facts, facts.text), _as_tower(facts, facts.vision)
    patches = _patches(facts.vision.image_size, facts.vision.patch_size)
    vision_embedding = (
        _patch_projection(facts, vision.hidden_size, facts.vision.patch_size)
        + vector(vision.hidden_size)
        + tensor(patches + 1, vision.hidden_size)
    )
    text_embedding = tensor(text.vocab_size, text.hidden_size) + tensor(text.max_position_embeddings, text.hidden_size)
    projections = tensor(facts.projection_dim, vision.hidden_size) + tensor(facts.projection_dim, text.hidden_size)
    logit_scale = tensor()
    return counted(
        embedding=vision_embedding + text_embedding,
        blocks=(_vision_block(text, "text", text.num_layers), _vision_block(vision, "vision", vision.num_layers)),
        head=projections,
        other=norms(vision, 2) + norm(text) + logit_scale,
    )


def count_vision_language(facts: ModelFacts) -> ParameterCounts:
    """Gemma 3: a language model, a SigLIP tower without class token or head, and the projection between them.

    Raises:
        ValueError: the facts lack the vision tower.
    """
    if facts.vision is None:
        raise ValueError(f"{facts.name}: a vision-language model needs a vision tower")
    language = count_decoder(facts)
    siglip = replace(
        _as_tower(facts, facts.vision),
        gated_mlp=False,
        norm="layernorm",
        norm_bias=True,
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        qk_norm=False,
    )
    pooled = facts.vision.pooling_head
    width, patches = siglip.hidden_size, _patches(facts.vision.image_size, facts.vision.patch_size)
    tower = _patch_projection(facts, width, facts.vision.patch_size) + vector(width) + tensor(patches, width)
    other = norm(siglip) + tensor(width, facts.hidden_size) + vector(width)
    if pooled:
        other += _pooling_head(siglip)
    return ParameterCounts(
        embedding=language.embedding + tower.total,
        blocks=(*language.blocks, _vision_block(siglip, "vision", siglip.num_layers)),
        head=language.head,
        other=language.other + other.total,
        outside=language.outside + tower.shapes + other.shapes,
    )


def _pooling_head(tower: ModelFacts) -> Weights:
    """SigLIP's head: one learned query, a multi-head attention with fused inputs, a norm and an MLP."""
    query = tensor(1, 1, tower.hidden_size)
    return query + attention(tower) + norm(tower) + mlp(tower, tower.intermediate_size)


def _as_tower(facts: ModelFacts, tower: TowerFacts) -> ModelFacts:
    """One tower as facts of its own, with everything else as in the whole model."""
    return replace(
        facts,
        hidden_size=tower.hidden_size,
        num_layers=tower.num_layers,
        num_heads=tower.num_heads,
        num_kv_heads=tower.num_heads,
        head_dim=tower.hidden_size // tower.num_heads,
        intermediate_size=tower.intermediate_size,
        vocab_size=tower.vocab_size,
        max_position_embeddings=tower.max_position_embeddings,
    )


def _vision_block(facts: ModelFacts, name: str, repeats: int) -> BlockCount:
    block = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, 2)
    if facts.layer_scale:
        block += vector(facts.hidden_size) + vector(facts.hidden_size)
    return block_count(name, repeats, block)


def _patches(image_size: int, patch_size: int) -> int:
    return (image_size // patch_size) ** 2


def _patch_projection(facts: ModelFacts, width: int, patch_size: int) -> Weights:
    return tensor(width, facts.num_channels or 3, patch_size, patch_size)


def _classifies(facts: ModelFacts) -> bool:
    return facts.architecture.endswith("ForImageClassification") and facts.num_labels > 0


def _classifier_inputs(facts: ModelFacts) -> int:
    """DINOv2 classifies the class token next to the mean of the patches."""
    return facts.hidden_size * (2 if facts.layer_scale else 1)
