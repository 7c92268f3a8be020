"""Arguments of the transformers configs of models that see images."""

from __future__ import annotations

from planner.models.facts import ModelFacts, TowerFacts
from strategies.tracing.to_hf.decoders import Arguments, gemma


def image(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "hidden_act": facts.activation,
        "image_size": facts.image_size,
        "patch_size": facts.patch_size,
        "num_channels": facts.num_channels,
        "num_labels": facts.num_labels,
        "qkv_bias": facts.qkv_bias,
    }


def vit(facts: ModelFacts) -> Arguments:
    return image(facts) | {"intermediate_size": facts.intermediate_size}


def dinov2(facts: ModelFacts) -> Arguments:
    # With SwiGLU, transformers derives the width from mlp_ratio: int(ratio * hidden * 2 / 3) rounded up to 8.
    ratio = 4 if facts.gated_mlp else facts.intermediate_size // facts.hidden_size
    return image(facts) | {"mlp_ratio": ratio, "use_swiglu_ffn": facts.gated_mlp}


def clip(facts: ModelFacts) -> Arguments:
    assert facts.text is not None
    assert facts.vision is not None
    text = {
        **_tower(facts.text),
        "vocab_size": facts.text.vocab_size,
        "max_position_embeddings": facts.text.max_position_embeddings,
        "hidden_act": facts.activation,
        "projection_dim": facts.projection_dim,
    }
    vision = {
        **_tower(facts.vision),
        "image_size": facts.vision.image_size,
        "patch_size": facts.vision.patch_size,
        "num_channels": facts.num_channels,
        "hidden_act": facts.activation,
        "projection_dim": facts.projection_dim,
    }
    return {"text_config": text, "vision_config": vision, "projection_dim": facts.projection_dim}


def gemma3(facts: ModelFacts) -> Arguments:
    assert facts.vision is not None
    vision = {
        **_tower(facts.vision),
        "image_size": facts.vision.image_size,
        "patch_size": facts.vision.patch_size,
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
    }
    return {
        "text_config": gemma(facts) | {"model_type": "gemma3_text"},
        "vision_config": vision,
        "mm_tokens_per_image": facts.vision.mm_tokens_per_image,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _tower(tower: TowerFacts) -> Arguments:
    return {
        "hidden_size": tower.hidden_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "intermediate_size": tower.intermediate_size,
    }
