"""Image encoders and models with two towers: ViT, DINOv2, CLIP, Gemma 3."""

from __future__ import annotations

from dataclasses import replace

from planner.models.counting.decoder import count_decoder
from planner.models.counting.weights import NOTHING, Weights, attention, linear, matrix, mlp, norm, norms, vector
from planner.models.facts import ModelFacts, TowerFacts
from planner.models.parameter_counts import BlockCount, ParameterCounts


def count_vision(facts: ModelFacts) -> ParameterCounts:
    """ViT and DINOv2: class token, patches, blocks, final norm, and a pooler or classifier where there is one."""
    hidden = facts.hidden_size
    patch_bias_and_tokens = vector(hidden) + vector(hidden)
    if facts.layer_scale:
        patch_bias_and_tokens += vector(hidden)  # DINOv2's mask token
    positions = matrix(_patches(facts.image_size, facts.patch_size) + 1, hidden)
    pooler = linear(hidden, hidden, bias=True) if facts.pooler else NOTHING
    classifier = linear(_classifier_inputs(facts), facts.num_labels, bias=True) if _classifies(facts) else NOTHING
    return ParameterCounts(
        embedding=(_patch_projection(facts, hidden, facts.patch_size) + patch_bias_and_tokens + positions).total,
        blocks=(_vision_block(facts, "vision", facts.num_layers),),
        head=classifier.total,
        other=(norm(facts) + pooler).total,
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
        + matrix(patches + 1, vision.hidden_size)
    )
    text_embedding = matrix(text.vocab_size + text.max_position_embeddings, text.hidden_size)
    vision_norms, text_norm = norms(vision, 2), norm(text)
    return ParameterCounts(
        embedding=vision_embedding.total + text_embedding.total,
        blocks=(_vision_block(text, "text", text.num_layers), _vision_block(vision, "vision", vision.num_layers)),
        head=(vision.hidden_size + text.hidden_size) * facts.projection_dim,
        other=vision_norms.total + text_norm.total + 1,
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
    tower = _patch_projection(facts, width, facts.vision.patch_size) + vector(width) + matrix(patches, width)
    projector = matrix(width, facts.hidden_size) + vector(width)
    return ParameterCounts(
        embedding=language.embedding + tower.total,
        blocks=(*language.blocks, _vision_block(siglip, "vision", siglip.num_layers)),
        head=language.head,
        other=language.other + norm(siglip).total + projector.total + (_pooling_head(siglip) if pooled else 0),
    )


def _pooling_head(tower: ModelFacts) -> int:
    """SigLIP's head: one learned query, a multi-head attention with fused inputs, a norm and an MLP."""
    query = vector(tower.hidden_size)
    return (query + attention(tower) + norm(tower) + mlp(tower, tower.intermediate_size)).total


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
    return BlockCount(name=name, repeats=repeats, parameters=block.total, largest_matrix=block.largest)


def _patches(image_size: int, patch_size: int) -> int:
    return (image_size // patch_size) ** 2


def _patch_projection(facts: ModelFacts, width: int, patch_size: int) -> Weights:
    return matrix((facts.num_channels or 3) * patch_size * patch_size, width)


def _classifies(facts: ModelFacts) -> bool:
    return facts.architecture.endswith("ForImageClassification") and facts.num_labels > 0


def _classifier_inputs(facts: ModelFacts) -> int:
    """DINOv2 classifies the class token next to the mean of the patches."""
    return facts.hidden_size * (2 if facts.layer_scale else 1)
