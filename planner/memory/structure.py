"""Structure: what two models must share for the same memory form to hold for both, whatever their sizes."""

from __future__ import annotations

from planner.models.facts import ModelFacts

_FIELDS = (
    *("model_type", "kind", "tie_word_embeddings", "gated_mlp", "activation", "norm", "norms_per_layer"),
    *("final_norm", "qk_norm", "post_norm", "parallel_residual", "position_type", "sliding_window_pattern"),
    *("fused_qkv", "fused_gate_up", "embedding_layernorm", "mlm_transform", "shared_layers", "layer_scale"),
    *("new_decoder_architecture", "shared_expert_gate", "share_att_key", "pooler"),
)
_PRESENT = (
    *("hidden_dropout", "attention_dropout", "attn_logit_softcapping", "final_logit_softcapping"),
    *("num_shared_experts", "shared_expert_intermediate_size", "first_k_dense", "sliding_window"),
)


def structure_of(facts: ModelFacts) -> dict[str, str]:
    """The structure by field, in words."""
    words = {name: str(getattr(facts, name)) for name in _FIELDS}
    words |= {name: str(bool(getattr(facts, name))) for name in _PRESENT}
    words["heads"] = _heads(facts)
    words["latent"] = str(facts.mla is not None and (2 if facts.mla.q_lora_rank else 1))
    words["moe"] = str(facts.is_moe)
    words["embedding"] = str(facts.embedding_size not in (0, facts.hidden_size))
    words["projected"] = str(facts.word_embed_proj_dim not in (0, facts.hidden_size))
    words["partly_rotated"] = str(facts.rotary_dim > 0 or facts.rotary_pct < 1)
    return words


def _heads(facts: ModelFacts) -> str:
    if facts.num_kv_heads == facts.num_heads:
        return "one key head each"
    return "one key head for all" if facts.num_kv_heads == 1 else "grouped"


def difference(one: dict[str, str], other: dict[str, str]) -> int:
    """In how many fields two structures differ."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
