"""The true bytes that autograd keeps of one block: real transformers modules, saved-tensors hooks, one layer against
two."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers

HIDDEN, HEADS, WIDTH, VOCABULARY, LENGTH, BATCH = 256, 4, 1024, 1000, 96, 3

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo2", "stablelm", "starcoder2")
_BERT_LIKE = ("phi", "gpt_neox", "bert", "roberta")
_GPT2_LIKE = ("gpt2", "gpt_bigcode")


def config_of(model_type: str, layers: int) -> Any:
    """A small config of a family, with attention dropout off so that a CPU build takes the flash path."""
    common = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDTH,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    }
    gpt2 = {"n_embd": HIDDEN, "n_layer": layers, "n_head": HEADS, "n_inner": WIDTH, "vocab_size": VOCABULARY}
    special: dict[str, dict[str, Any]] = {
        "gptj": {**gpt2, "rotary_dim": 32},
        "opt": {**common, "ffn_dim": WIDTH, "word_embed_proj_dim": HIDDEN},
        "phi3": {**common, "pad_token_id": 0},
        "bloom": {"hidden_size": HIDDEN, "n_layer": layers, "n_head": HEADS, "vocab_size": VOCABULARY},
        "mpt": {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": layers, "vocab_size": VOCABULARY, "max_seq_len": 512},
        "modernbert": {
            **common,
            "pad_token_id": 0,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "global_attn_every_n_layers": 1,
        },
        "mixtral": {**common, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen2_moe": {
            **common,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    }
    if model_type in _LLAMA_LIKE:
        values = {**common, "num_key_value_heads": 2}
    elif model_type in _BERT_LIKE:
        values = common
    elif model_type in _GPT2_LIKE:
        values = gpt2
    else:
        values = special[model_type]
    config = transformers.AutoConfig.for_model(model_type, **values)
    for name in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def block_bytes_traced(model_type: str, precision: str, attention: str) -> int:
    """Bytes that one more block keeps for backward: two layers less one layer."""
    return _saved(model_type, 2, precision, attention) - _saved(model_type, 1, precision, attention)


def _saved(model_type: str, layers: int, precision: str, attention: str) -> int:
    torch.manual_seed(0)
    config = config_of(model_type, layers)
    config._attn_implementation = attention
    encoder = model_type in ("bert", "roberta", "modernbert")
    auto = transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM
    if not encoder:
        config.use_cache = False
    model = auto.from_config(config).train()
    if precision == "pure":
        model = model.to(torch.bfloat16)
    tokens = torch.randint(0, VOCABULARY - 1, (BATCH, LENGTH))
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    shapes = {tuple(tensor.shape) for tensor in model.parameters()}
    shapes |= {tuple(tensor.t().shape) for tensor in model.parameters() if tensor.dim() == 2}
    kept: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast_weight = precision == "autocast" and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not is_cast_weight:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model(input_ids=tokens, labels=tokens)
    return sum(size for size, _ in kept.values())
