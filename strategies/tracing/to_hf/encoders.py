"""Arguments of the transformers configs of encoders, encoder-decoders and models that see images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.models.facts import ModelFacts, TowerFacts
from strategies.tracing.to_hf.decoders import Arguments, gemma, standard

__all__ = ["ENCODERS"]


def bert(facts: ModelFacts) -> Arguments:
    return standard(facts) | {"type_vocab_size": facts.type_vocab_size}


def albert(facts: ModelFacts) -> Arguments:
    return bert(facts) | {"embedding_size": facts.embedding_size}


def distilbert(facts: ModelFacts) -> Arguments:
    return {
        "dim": facts.hidden_size,
        "n_layers": facts.num_layers,
        "n_heads": facts.num_heads,
        "hidden_dim": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "activation": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def deberta(facts: ModelFacts) -> Arguments:
    return bert(facts) | {
        "relative_attention": True,
        "position_buckets": facts.position_buckets,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": facts.share_att_key,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "max_relative_positions": -1,
        "legacy": True,
    }


def modernbert(facts: ModelFacts) -> Arguments:
    arguments = standard(facts)
    return arguments | {
        "hidden_activation": arguments.pop("hidden_act"),
        "local_attention": facts.sliding_window,
        "cls_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "sep_token_id": 0,
    }


def t5(facts: ModelFacts) -> Arguments:
    gate = "gated-" if facts.gated_mlp else ""
    return {
        "d_model": facts.hidden_size,
        "d_kv": facts.head_dim,
        "d_ff": facts.intermediate_size,
        "num_layers": facts.encoder_layers,
        "num_decoder_layers": facts.decoder_layers,
        "num_heads": facts.num_heads,
        "vocab_size": facts.vocab_size,
        "relative_attention_num_buckets": facts.relative_attention_num_buckets,
        "feed_forward_proj": gate + {"gelu_new": "gelu"}.get(facts.activation, facts.activation),
    }


def bart(facts: ModelFacts) -> Arguments:
    return {
        "d_model": facts.hidden_size,
        "encoder_layers": facts.encoder_layers,
        "decoder_layers": facts.decoder_layers,
        "encoder_attention_heads": facts.num_heads,
        "decoder_attention_heads": facts.num_heads,
        "encoder_ffn_dim": facts.intermediate_size,
        "decoder_ffn_dim": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "activation_function": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def whisper(facts: ModelFacts) -> Arguments:
    arguments = bart(facts)
    del arguments["max_position_embeddings"]
    return arguments | {
        "num_mel_bins": facts.num_mel_bins,
        "max_source_positions": facts.max_source_positions,
        "max_target_positions": facts.max_target_positions,
        "pad_token_id": 0,
    }


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


ENCODERS: Mapping[str, Callable[[ModelFacts], Arguments]] = {
    "albert": albert,
    "bart": bart,
    "bert": bert,
    "clip": clip,
    "deberta-v2": deberta,
    "dinov2": dinov2,
    "distilbert": distilbert,
    "electra": albert,
    "gemma3": gemma3,
    "m2m_100": bart,
    "mbart": bart,
    "modernbert": modernbert,
    "mt5": t5,
    "pegasus": bart,
    "roberta": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "xlm-roberta": bert,
}
