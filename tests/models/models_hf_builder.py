"""Transformers configs made by hand from catalogue figures: the reference that counts and config reading are held to.

Nothing here reads `planner.models.architectures`, so a mistake in a key name or a constant there cannot cancel out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from planner.models.facts import ModelFacts

Arguments = dict[str, Any]

# Rows whose own class lives outside transformers are built from the transformers class with the same weights.
STAND_INS: Mapping[str, str] = {
    "baichuan": "llama",
    "internlm2": "llama",
    "internlm3": "llama",
    "chatglm": "glm",
    "kimi_k2": "deepseek_v3",
}
STAND_IN_CLASSES: Mapping[str, str] = {
    "MPTForCausalLM": "MptForCausalLM",
    "BaiChuanForCausalLM": "LlamaForCausalLM",
    "BaichuanForCausalLM": "LlamaForCausalLM",
    "InternLM2ForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "ChatGLMModel": "GlmForCausalLM",
}
# No class of transformers 5.23 has these weights.
NOT_IN_TRANSFORMERS = frozenset({"deepseek"})


def _standard(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "intermediate_size": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "hidden_act": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _grouped(facts: ModelFacts) -> Arguments:
    return _standard(facts) | {"num_key_value_heads": facts.num_kv_heads, "head_dim": facts.head_dim}


def _windowed(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {"sliding_window": facts.sliding_window or None}


def _partly_rotated(facts: ModelFacts) -> Arguments:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": facts.rotary_pct}
    return {"rope_parameters": rope}


def _llama(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {"attention_bias": facts.qkv_bias, "mlp_bias": facts.mlp_bias}


def _gpt2(facts: ModelFacts) -> Arguments:
    return {
        "n_embd": facts.hidden_size,
        "n_layer": facts.num_layers,
        "n_head": facts.num_heads,
        "n_inner": facts.intermediate_size,
        "n_positions": facts.max_position_embeddings,
        "vocab_size": facts.vocab_size,
        "activation_function": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _gpt_bigcode(facts: ModelFacts) -> Arguments:
    return _gpt2(facts) | {"multi_query": facts.num_kv_heads == 1}


def _rotary_gpt2(facts: ModelFacts) -> Arguments:
    return _gpt2(facts) | {"rotary_dim": facts.rotary_dim}


def _gpt_neo(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "num_layers": facts.num_layers,
        "num_heads": facts.num_heads,
        "intermediate_size": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "window_size": facts.sliding_window,
        "activation_function": facts.activation,
        "attention_types": [[["global", "local"], facts.num_layers // 2]]
        if facts.num_layers % 2 == 0
        else [[["global"], facts.num_layers]],
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _gpt_neox(facts: ModelFacts) -> Arguments:
    own = {"use_parallel_residual": facts.parallel_residual, "attention_bias": facts.qkv_bias}
    return _standard(facts) | _partly_rotated(facts) | own


def _opt(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "ffn_dim": facts.intermediate_size,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_position_embeddings,
        "word_embed_proj_dim": facts.word_embed_proj_dim,
        "do_layer_norm_before": not facts.post_norm,
        "activation_function": facts.activation,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _bloom(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "n_layer": facts.num_layers,
        "n_head": facts.num_heads,
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _falcon(facts: ModelFacts) -> Arguments:
    return _standard(facts) | {
        "ffn_hidden_size": facts.intermediate_size,
        "num_kv_heads": facts.num_kv_heads,
        "multi_query": facts.num_kv_heads == 1,
        "alibi": facts.position_type == "alibi",
        "parallel_attn": facts.parallel_residual,
        "new_decoder_architecture": facts.new_decoder_architecture,
        "num_ln_in_parallel_attn": facts.num_ln_in_parallel_attn or None,
        "bias": facts.qkv_bias,
    }


def _mpt(facts: ModelFacts) -> Arguments:
    return {
        "d_model": facts.hidden_size,
        "n_layers": facts.num_layers,
        "n_heads": facts.num_heads,
        "expansion_ratio": facts.intermediate_size // facts.hidden_size,
        "max_seq_len": facts.max_position_embeddings,
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def _phi(facts: ModelFacts) -> Arguments:
    return _standard(facts) | _partly_rotated(facts) | {"num_key_value_heads": facts.num_kv_heads}


def _phi3(facts: ModelFacts) -> Arguments:
    return _windowed(facts) | _partly_rotated(facts) | {"pad_token_id": 0, "eos_token_id": 1}


def _stablelm(facts: ModelFacts) -> Arguments:
    return _standard(facts) | {
        "num_key_value_heads": facts.num_kv_heads,
        "use_qkv_bias": facts.qkv_bias,
        "qk_layernorm": facts.qk_norm == "per_head_layernorm",
        "use_parallel_residual": facts.parallel_residual,
    }


def _cohere(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {"use_qk_norm": bool(facts.qk_norm), "attention_bias": facts.qkv_bias}


def _starcoder2(facts: ModelFacts) -> Arguments:
    return _windowed(facts) | {"use_bias": facts.mlp_bias}


def _gemma(facts: ModelFacts) -> Arguments:
    arguments = _windowed(facts)
    return arguments | {"hidden_activation": arguments.pop("hidden_act")}


def _mixtral(facts: ModelFacts) -> Arguments:
    return _windowed(facts) | {
        "num_local_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "intermediate_size": facts.moe_intermediate_size,
    }


def _phimoe(facts: ModelFacts) -> Arguments:
    return _mixtral(facts) | {"attention_bias": facts.qkv_bias, "lm_head_bias": facts.lm_head_bias}


def _gpt_oss(facts: ModelFacts) -> Arguments:
    return _mixtral(facts) | {"attention_bias": facts.qkv_bias, "hidden_act": "silu"}


def _olmoe(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
    }


def _qwen_moe(facts: ModelFacts) -> Arguments:
    return _windowed(facts) | {
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "shared_expert_intermediate_size": facts.shared_expert_intermediate_size,
    }


def _deepseek(facts: ModelFacts) -> Arguments:
    assert facts.mla is not None
    return _standard(facts) | {
        "num_key_value_heads": facts.num_kv_heads,
        "n_routed_experts": facts.num_experts,
        "n_shared_experts": facts.num_shared_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "first_k_dense_replace": facts.first_k_dense,
        "q_lora_rank": facts.mla.q_lora_rank,
        "kv_lora_rank": facts.mla.kv_lora_rank,
        "qk_nope_head_dim": facts.mla.qk_nope_head_dim,
        "qk_rope_head_dim": facts.mla.qk_rope_head_dim,
        "v_head_dim": facts.mla.v_head_dim,
        "num_nextn_predict_layers": facts.num_nextn_predict_layers,
    }


def _glm4_moe(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {
        "attention_bias": facts.qkv_bias,
        "use_qk_norm": bool(facts.qk_norm),
        "n_routed_experts": facts.num_experts,
        "n_shared_experts": facts.num_shared_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "first_k_dense_replace": facts.first_k_dense,
        "num_nextn_predict_layers": facts.num_nextn_predict_layers,
    }


def _glm(facts: ModelFacts) -> Arguments:
    return _grouped(facts) | {"attention_bias": facts.qkv_bias, "pad_token_id": 0}


def _bert(facts: ModelFacts) -> Arguments:
    return _standard(facts) | {"type_vocab_size": facts.type_vocab_size}


def _albert(facts: ModelFacts) -> Arguments:
    return _bert(facts) | {"embedding_size": facts.embedding_size}


def _distilbert(facts: ModelFacts) -> Arguments:
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


def _deberta(facts: ModelFacts) -> Arguments:
    return _bert(facts) | {
        "relative_attention": True,
        "position_buckets": facts.position_buckets,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": facts.share_att_key,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "max_relative_positions": -1,
        "legacy": True,
    }


def _modernbert(facts: ModelFacts) -> Arguments:
    arguments = _standard(facts)
    return arguments | {
        "hidden_activation": arguments.pop("hidden_act"),
        "local_attention": facts.sliding_window,
        "cls_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "sep_token_id": 0,
    }


def _t5(facts: ModelFacts) -> Arguments:
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


def _bart(facts: ModelFacts) -> Arguments:
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


def _whisper(facts: ModelFacts) -> Arguments:
    arguments = _bart(facts)
    del arguments["max_position_embeddings"]
    return arguments | {
        "num_mel_bins": facts.num_mel_bins,
        "max_source_positions": facts.max_source_positions,
        "max_target_positions": facts.max_target_positions,
        "pad_token_id": 0,
    }


def _image(facts: ModelFacts) -> Arguments:
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


def _vit(facts: ModelFacts) -> Arguments:
    return _image(facts) | {"intermediate_size": facts.intermediate_size}


def _dinov2(facts: ModelFacts) -> Arguments:
    # With SwiGLU, transformers derives the width from mlp_ratio: int(ratio * hidden * 2 / 3) rounded up to 8.
    ratio = 4 if facts.gated_mlp else facts.intermediate_size // facts.hidden_size
    return _image(facts) | {"mlp_ratio": ratio, "use_swiglu_ffn": facts.gated_mlp}


def _clip(facts: ModelFacts) -> Arguments:
    assert facts.text is not None
    assert facts.vision is not None
    text = {
        "hidden_size": facts.text.hidden_size,
        "num_hidden_layers": facts.text.num_layers,
        "num_attention_heads": facts.text.num_heads,
        "intermediate_size": facts.text.intermediate_size,
        "vocab_size": facts.text.vocab_size,
        "max_position_embeddings": facts.text.max_position_embeddings,
        "hidden_act": facts.activation,
        "projection_dim": facts.projection_dim,
    }
    vision = {
        "hidden_size": facts.vision.hidden_size,
        "num_hidden_layers": facts.vision.num_layers,
        "num_attention_heads": facts.vision.num_heads,
        "intermediate_size": facts.vision.intermediate_size,
        "image_size": facts.vision.image_size,
        "patch_size": facts.vision.patch_size,
        "num_channels": facts.num_channels,
        "hidden_act": facts.activation,
        "projection_dim": facts.projection_dim,
    }
    return {"text_config": text, "vision_config": vision, "projection_dim": facts.projection_dim}


def _gemma3(facts: ModelFacts) -> Arguments:
    assert facts.vision is not None
    vision = {
        "hidden_size": facts.vision.hidden_size,
        "num_hidden_layers": facts.vision.num_layers,
        "num_attention_heads": facts.vision.num_heads,
        "intermediate_size": facts.vision.intermediate_size,
        "image_size": facts.vision.image_size,
        "patch_size": facts.vision.patch_size,
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
    }
    return {
        "text_config": _gemma(facts) | {"model_type": "gemma3_text"},
        "vision_config": vision,
        "mm_tokens_per_image": facts.vision.mm_tokens_per_image,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


ARGUMENTS: Mapping[str, Callable[[ModelFacts], Arguments]] = {
    "albert": _albert,
    "bart": _bart,
    "bert": _bert,
    "bloom": _bloom,
    "clip": _clip,
    "codegen": _rotary_gpt2,
    "cohere": _cohere,
    "deberta-v2": _deberta,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "dinov2": _dinov2,
    "distilbert": _distilbert,
    "electra": _albert,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "gemma3_text": _gemma,
    "glm": _glm,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _rotary_gpt2,
    "granite": _llama,
    "granitemoe": _mixtral,
    "llama": _llama,
    "m2m_100": _bart,
    "mbart": _bart,
    "mistral": _windowed,
    "mixtral": _mixtral,
    "modernbert": _modernbert,
    "mpt": _mpt,
    "mt5": _t5,
    "olmo": _grouped,
    "olmo2": _grouped,
    "olmoe": _olmoe,
    "opt": _opt,
    "pegasus": _bart,
    "phi": _phi,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2": _windowed,
    "qwen2_moe": _qwen_moe,
    "qwen3": _windowed,
    "qwen3_moe": _qwen_moe,
    "roberta": _bert,
    "smollm3": _llama,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "xlm-roberta": _bert,
}


def hf_config(facts: ModelFacts) -> Any:
    """The transformers config with the figures of `facts`."""
    model_type = STAND_INS.get(facts.model_type, facts.model_type)
    config = transformers.AutoConfig.for_model(model_type, **ARGUMENTS[model_type](facts))
    config.architectures = [facts.architecture]
    return config


def meta_model(config: Any, facts: ModelFacts) -> torch.nn.Module:
    """The class named by the row, on the meta device; an untied T5 head as `from_pretrained` leaves it."""
    model_class = getattr(transformers, STAND_IN_CLASSES.get(facts.architecture, facts.architecture))
    with torch.device("meta"):
        model: torch.nn.Module = model_class(copy.deepcopy(config))
    if facts.model_type in ("t5", "mt5") and not facts.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def real_count(model: torch.nn.Module) -> int:
    """Parameters, each counted once however many names it has."""
    return sum(parameter.numel() for parameter in model.parameters())


def shortened(facts: ModelFacts, depth: int) -> ModelFacts:
    """The same architecture with at most `depth` blocks in every tower."""
    return replace(
        facts,
        num_layers=min(facts.num_layers, depth),
        encoder_layers=min(facts.encoder_layers, depth),
        decoder_layers=min(facts.decoder_layers, depth),
        first_k_dense=min(facts.first_k_dense, depth - 1),
        text=facts.text and replace(facts.text, num_layers=min(facts.text.num_layers, depth)),
        vision=facts.vision and replace(facts.vision, num_layers=min(facts.vision.num_layers, depth)),
    )
