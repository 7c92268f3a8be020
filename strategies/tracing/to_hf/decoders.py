"""Arguments of the transformers configs of decoders, dense and of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.models.facts import ModelFacts

__all__ = ["DECODERS", "Arguments"]


Arguments = dict[str, Any]


def standard(facts: ModelFacts) -> Arguments:
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


def grouped(facts: ModelFacts) -> Arguments:
    return standard(facts) | {"num_key_value_heads": facts.num_kv_heads, "head_dim": facts.head_dim}


def windowed(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {"sliding_window": facts.sliding_window or None}


def partly_rotated(facts: ModelFacts) -> Arguments:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": facts.rotary_pct}
    return {"rope_parameters": rope}


def llama(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {"attention_bias": facts.qkv_bias, "mlp_bias": facts.mlp_bias}


def gpt2(facts: ModelFacts) -> Arguments:
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


def gpt_bigcode(facts: ModelFacts) -> Arguments:
    return gpt2(facts) | {"multi_query": facts.num_kv_heads == 1}


def rotary_gpt2(facts: ModelFacts) -> Arguments:
    return gpt2(facts) | {"rotary_dim": facts.rotary_dim}


def gpt_neo(facts: ModelFacts) -> Arguments:
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


def gpt_neox(facts: ModelFacts) -> Arguments:
    own = {"use_parallel_residual": facts.parallel_residual, "attention_bias": facts.qkv_bias}
    return standard(facts) | partly_rotated(facts) | own


def opt(facts: ModelFacts) -> Arguments:
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


def bloom(facts: ModelFacts) -> Arguments:
    return {
        "hidden_size": facts.hidden_size,
        "n_layer": facts.num_layers,
        "n_head": facts.num_heads,
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def falcon(facts: ModelFacts) -> Arguments:
    return standard(facts) | {
        "ffn_hidden_size": facts.intermediate_size,
        "num_kv_heads": facts.num_kv_heads,
        "multi_query": facts.num_kv_heads == 1,
        "alibi": facts.position_type == "alibi",
        "parallel_attn": facts.parallel_residual,
        "new_decoder_architecture": facts.new_decoder_architecture,
        "num_ln_in_parallel_attn": facts.num_ln_in_parallel_attn or None,
        "bias": facts.qkv_bias,
    }


def mpt(facts: ModelFacts) -> Arguments:
    return {
        "d_model": facts.hidden_size,
        "n_layers": facts.num_layers,
        "n_heads": facts.num_heads,
        "expansion_ratio": facts.intermediate_size // facts.hidden_size,
        "max_seq_len": facts.max_position_embeddings,
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": facts.tie_word_embeddings,
    }


def phi(facts: ModelFacts) -> Arguments:
    return standard(facts) | partly_rotated(facts) | {"num_key_value_heads": facts.num_kv_heads}


def phi3(facts: ModelFacts) -> Arguments:
    return windowed(facts) | partly_rotated(facts) | {"pad_token_id": 0, "eos_token_id": 1}


def stablelm(facts: ModelFacts) -> Arguments:
    return standard(facts) | {
        "num_key_value_heads": facts.num_kv_heads,
        "use_qkv_bias": facts.qkv_bias,
        "qk_layernorm": facts.qk_norm == "per_head_layernorm",
        "use_parallel_residual": facts.parallel_residual,
    }


def cohere(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {"use_qk_norm": bool(facts.qk_norm), "attention_bias": facts.qkv_bias}


def starcoder2(facts: ModelFacts) -> Arguments:
    return windowed(facts) | {"use_bias": facts.mlp_bias}


def gemma(facts: ModelFacts) -> Arguments:
    arguments = windowed(facts)
    return arguments | {"hidden_activation": arguments.pop("hidden_act")}


def glm(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {"attention_bias": facts.qkv_bias, "pad_token_id": 0}


def mixtral(facts: ModelFacts) -> Arguments:
    return windowed(facts) | {
        "num_local_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "intermediate_size": facts.moe_intermediate_size,
    }


def phimoe(facts: ModelFacts) -> Arguments:
    return mixtral(facts) | {"attention_bias": facts.qkv_bias, "lm_head_bias": facts.lm_head_bias}


def gpt_oss(facts: ModelFacts) -> Arguments:
    return mixtral(facts) | {"attention_bias": facts.qkv_bias, "hidden_act": "silu"}


def olmoe(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
    }


def qwen_moe(facts: ModelFacts) -> Arguments:
    return windowed(facts) | {
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "shared_expert_intermediate_size": facts.shared_expert_intermediate_size,
    }


def deepseek(facts: ModelFacts) -> Arguments:
    assert facts.mla is not None
    return standard(facts) | {
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


def glm4_moe(facts: ModelFacts) -> Arguments:
    return grouped(facts) | {
        "attention_bias": facts.qkv_bias,
        "use_qk_norm": bool(facts.qk_norm),
        "n_routed_experts": facts.num_experts,
        "n_shared_experts": facts.num_shared_experts,
        "num_experts_per_tok": facts.experts_per_token,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "first_k_dense_replace": facts.first_k_dense,
        "num_nextn_predict_layers": facts.num_nextn_predict_layers,
    }


DECODERS: Mapping[str, Callable[[ModelFacts], Arguments]] = {
    "bloom": bloom,
    "codegen": rotary_gpt2,
    "cohere": cohere,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "glm": glm,
    "glm4_moe": glm4_moe,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gpt_neo": gpt_neo,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": rotary_gpt2,
    "granite": llama,
    "granitemoe": mixtral,
    "llama": llama,
    "mistral": windowed,
    "mixtral": mixtral,
    "mpt": mpt,
    "olmo": grouped,
    "olmo2": grouped,
    "olmoe": olmoe,
    "opt": opt,
    "phi": phi,
    "phi3": phi3,
    "phimoe": phimoe,
    "qwen2": windowed,
    "qwen2_moe": qwen_moe,
    "qwen3": windowed,
    "qwen3_moe": qwen_moe,
    "smollm3": llama,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}
