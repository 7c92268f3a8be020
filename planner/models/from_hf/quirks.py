"""Config keys that mean something only their own architecture's code knows.

Each function takes the config and the figures read so far, and returns those it changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from planner.limits import Limit
from planner.models.facts import MlaFacts, TowerFacts
from planner.models.from_hf.reader import FACTORY_REMEDY, ConfigReader

Figures = dict[str, Any]
_RATIO = Limit(least=0, most=1000, fraction=True)
_WIDTH = Limit(least=1, most=1_000_000)
_STEP = Limit(least=0, most=10_000)
Quirk = Callable[[ConfigReader, Figures], Figures]


def _window_switch(reader: ConfigReader, figures: Figures) -> Figures:
    """Qwen and SmolLM3 write a window and switch it off beside it."""
    return {} if reader.value("use_sliding_window") else {"sliding_window": 0}


def _rotary_share(reader: ConfigReader, figures: Figures) -> Figures:
    """Read the rotated share of a head, which transformers 5 moved into `rope_parameters`."""
    share = reader.number("partial_rotary_factor", _RATIO, section="rope_parameters")
    return {} if share is None else {"rotary_pct": float(share)}


def _opt(reader: ConfigReader, figures: Figures) -> Figures:
    before = bool(reader.value("do_layer_norm_before"))
    return {
        "post_norm": not before,
        "final_norm": before and not reader.value("_remove_final_layer_norm"),
        "word_embed_proj_dim": figures.get("word_embed_proj_dim", figures["hidden_size"]),
    }


def _falcon(reader: ConfigReader, figures: Figures) -> Figures:
    """Falcon-40B has a norm each for attention and MLP; older parallel blocks share one, serial blocks have two."""
    new = figures["new_decoder_architecture"]
    parallel = figures["parallel_residual"] or new
    changed: Figures = {"parallel_residual": parallel, "position_type": "alibi" if reader.value("alibi") else "rope"}
    if new:
        changed["norms_per_layer"] = figures.get("num_ln_in_parallel_attn", 2)
    else:
        changed["norms_per_layer"] = 1 if parallel else 2
        changed["num_kv_heads"] = 1 if reader.value("multi_query") else figures["num_heads"]
    return changed


def _mpt(reader: ConfigReader, figures: Figures) -> Figures:
    dropout = reader.number("attn_pdrop", _RATIO, 0.0, section="attn_config")
    if (reader.config.get("attn_config") or {}).get("qk_ln"):
        raise reader.problem("field 'attn_config' sets qk_ln, whose norms are not counted", FACTORY_REMEDY)
    return {
        "intermediate_size": int(reader.number("expansion_ratio", _RATIO, 4) * figures["hidden_size"]),
        "attention_dropout": float(dropout),
    }


def _gpt_neo(reader: ConfigReader, figures: Figures) -> Figures:
    kinds = str(reader.config.get("attention_types") or reader.config.get("attention_layers") or "local")
    return {} if "local" in kinds else {"sliding_window": 0, "sliding_window_pattern": ""}


def _gpt_bigcode(reader: ConfigReader, figures: Figures) -> Figures:
    return {"num_kv_heads": 1} if reader.value("multi_query") else {}


def _stablelm(reader: ConfigReader, figures: Figures) -> Figures:
    return {
        "qk_norm": "per_head_layernorm" if reader.value("qk_layernorm") else False,
        "norms_per_layer": 1 if figures["parallel_residual"] else 2,
    }


def _cohere(reader: ConfigReader, figures: Figures) -> Figures:
    return {"qk_norm": "per_head_layernorm" if reader.value("use_qk_norm") else False}


def _latent_attention(reader: ConfigReader, figures: Figures) -> Figures:
    """DeepSeek's attention; `q_lora_rank` null means uncompressed queries, as in V2-Lite."""
    sizes: dict[str, Any] = {}
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        sizes[key] = reader.number(key, _WIDTH, 0)
    mla = MlaFacts(q_lora_rank=reader.number("q_lora_rank", _WIDTH), **sizes)
    return {"mla": mla, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}


def _sparse_steps(reader: ConfigReader, figures: Figures) -> Figures:
    """Qwen's MoE layers: every `decoder_sparse_step`-th, less those in `mlp_only_layers`."""
    layers, step = range(figures["num_layers"]), int(reader.number("decoder_sparse_step", _STEP, 1) or 1)
    dense = reader.names("mlp_only_layers")
    return {"first_k_dense": sum(1 for layer in layers if layer in dense or (layer + 1) % step)}


def _baichuan(reader: ConfigReader, figures: Figures) -> Figures:
    return {"position_type": "alibi"} if figures["num_layers"] == 40 else {}


def _bert_heads(reader: ConfigReader, figures: Figures) -> Figures:
    """Return which head the class has; a pooler comes with the bare model and with BERT's pre-training."""
    built = figures["architecture"]
    bare = built.endswith("Model") and reader.architecture.model_type in ("bert", "roberta", "xlm-roberta", "albert")
    masked = built.endswith("ForMaskedLM") or (built.endswith("ForPreTraining") and "Electra" not in built)
    return {
        "pooler": bare,
        "mlm_transform": masked,
        "lm_head_bias": figures.get("lm_head_bias", True) and built.endswith(("ForMaskedLM", "ForPreTraining")),
    }


def _deberta(reader: ConfigReader, figures: Figures) -> Figures:
    """Disentangled attention has extra projections for each term of `pos_att_type` unless it shares the content's."""
    if figures["position_buckets"] < 1:
        raise reader.problem("field 'position_buckets' is not above 0", FACTORY_REMEDY)
    terms = reader.names("pos_att_type")
    if not figures["share_att_key"] and terms != {"c2p", "p2c"}:
        given = sorted(map(str, terms))
        raise reader.problem(f"field 'pos_att_type' is {given}; only c2p with p2c is counted", FACTORY_REMEDY)
    return {}


def _t5(reader: ConfigReader, figures: Figures) -> Figures:
    """`feed_forward_proj` is an activation, with `gated-` before it for GLUs; gated-gelu means the tanh form."""
    feed_forward = str(reader.value("feed_forward_proj"))
    activation = feed_forward.removeprefix("gated-")
    return {
        "gated_mlp": feed_forward.startswith("gated-"),
        "activation": "gelu_new" if feed_forward == "gated-gelu" else activation,
        "decoder_layers": figures.get("decoder_layers", figures["encoder_layers"]),
    }


def _one_width(reader: ConfigReader, figures: Figures) -> Figures:
    """BART's decoder width is only worth keeping where it differs from the encoder's."""
    same = figures["decoder_intermediate_size"] == figures["intermediate_size"]
    return {"decoder_intermediate_size": 0} if same else {}


def _image_positions(reader: ConfigReader, figures: Figures) -> Figures:
    """Patches of the image and the class token."""
    return {"max_position_embeddings": (figures["image_size"] // figures["patch_size"]) ** 2 + 1}


def _vit(reader: ConfigReader, figures: Figures) -> Figures:
    return {"pooler": figures["architecture"] == "ViTModel"}


def _dinov2(reader: ConfigReader, figures: Figures) -> Figures:
    """Return figures in which, with SwiGLU, the width is 2/3 of `mlp_ratio` times hidden, rounded up to eights."""
    width = int(figures["hidden_size"] * reader.number("mlp_ratio", _RATIO, 4))
    if not reader.value("use_swiglu_ffn"):
        return {"intermediate_size": width}
    return {"intermediate_size": math.ceil(int(width * 2 / 3) / 8) * 8, "gated_mlp": True}


def _clip(reader: ConfigReader, figures: Figures) -> Figures:
    text, vision = reader.part("text_config", "clip_text_model"), reader.part("vision_config", "clip_vision_model")
    seen = vision.facts()
    tower = {key: seen[key] for key in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "image_size")}
    words = text.facts()
    return {
        **tower,
        "num_channels": seen["num_channels"],
        "activation": seen["activation"],
        "attention_dropout": seen["attention_dropout"],
        "patch_size": seen["patch_size"],
        "vocab_size": words["vocab_size"],
        "max_position_embeddings": words["max_position_embeddings"],
        "text": _tower(words),
        "vision": TowerFacts(**tower, patch_size=seen["patch_size"]),
    }


def _tower(figures: Figures, **more: Any) -> TowerFacts:
    needed = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
    return TowerFacts(**{**{name: figures[name] for name in needed}, **figures, **more})


def _gemma3(reader: ConfigReader, figures: Figures) -> Figures:
    language, vision = reader.part("text_config", "gemma3_text"), reader.part("vision_config", "siglip_vision_model")
    tower = _tower(
        vision.facts(),
        model_type=vision.architecture.model_type,
        mm_tokens_per_image=reader.number("mm_tokens_per_image", _WIDTH, 256),
        pooling_head=bool(vision.value("vision_use_head")),
    )
    return {**language.facts(), "vision": tower}


QUIRKS: Mapping[str, tuple[Quirk, ...]] = {
    "qwen2": (_window_switch,),
    "qwen3": (_window_switch,),
    "smollm3": (_window_switch,),
    "qwen2_moe": (_window_switch, _sparse_steps),
    "qwen3_moe": (_window_switch, _sparse_steps),
    "glm": (_rotary_share,),
    "glm4_moe": (_rotary_share,),
    "phi": (_rotary_share,),
    "phi3": (_rotary_share,),
    "gpt_neox": (_rotary_share,),
    "stablelm": (_rotary_share, _stablelm),
    "opt": (_opt,),
    "falcon": (_falcon,),
    "mpt": (_mpt,),
    "gpt_neo": (_gpt_neo,),
    "gpt_bigcode": (_gpt_bigcode,),
    "cohere": (_cohere,),
    "deepseek_v2": (_latent_attention,),
    "deepseek_v3": (_latent_attention,),
    "kimi_k2": (_latent_attention,),
    "baichuan": (_baichuan,),
    "bert": (_bert_heads,),
    "roberta": (_bert_heads,),
    "xlm-roberta": (_bert_heads,),
    "albert": (_bert_heads,),
    "electra": (_bert_heads,),
    "distilbert": (_bert_heads,),
    "modernbert": (_bert_heads,),
    "deberta-v2": (_bert_heads, _deberta),
    "t5": (_t5,),
    "mt5": (_t5,),
    "bart": (_one_width,),
    "mbart": (_one_width,),
    "pegasus": (_one_width,),
    "m2m_100": (_one_width,),
    "whisper": (_one_width,),
    "vit": (_image_positions, _vit),
    "dinov2": (_dinov2, _image_positions),
    "clip": (_clip,),
    "gemma3": (_gemma3,),
}
