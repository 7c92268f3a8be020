"""Arguments of the transformers configs of mixtures of experts."""

from __future__ import annotations

from planner.models.facts import ModelFacts
from strategies.tracing.to_hf.decoders import Arguments, grouped, standard, windowed


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
