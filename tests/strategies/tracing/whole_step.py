"""The true peak of a whole step, storage by storage: a small transformers model, its forward, loss and backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers

from planner.vocabulary import Attention, Checkpointing, Precision
from strategies.tracing.storage_tracker import StorageTracker

HIDDEN, HEADS, WIDTH, LAYERS, BATCH = 128, 4, 512, 4, 2
VOCABULARY, LENGTH = 512, 384

_USUAL = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": WIDTH,
}
_WORDS = {**_USUAL, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
_GROUPED = {**_WORDS, "num_key_value_heads": 2, "pad_token_id": 0}
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY}
_TWO_STACKS = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": WIDTH,
    "decoder_ffn_dim": WIDTH,
    "vocab_size": VOCABULARY,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gemma2": {**_GROUPED, "head_dim": 32},
    "phi3": _GROUPED,
    "cohere": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**_GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 1024},
    "gpt2": _GPT2,
    "gpt_neox": _WORDS,
    "falcon": {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
    },
    "bloom": {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY},
    "bert": _WORDS,
    "modernbert": {**_WORDS, **_IDS, "cls_token_id": 0, "sep_token_id": 0},
    "bart": _TWO_STACKS,
    "whisper": {**_TWO_STACKS, **_IDS, "decoder_start_token_id": 0, "max_source_positions": LENGTH},
    "t5": {
        "d_model": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "d_ff": WIDTH,
        "d_kv": 32,
        "dropout_rate": 0.0,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 0,
    },
    "vit": {**_USUAL, "image_size": 224, "patch_size": 16},
    "dinov2": {name: _USUAL[name] for name in list(_USUAL)[:3]} | {"image_size": 224, "patch_size": 14},
}
_CLASSES = {
    "bert": transformers.AutoModelForMaskedLM,
    "modernbert": transformers.AutoModelForMaskedLM,
    "bart": transformers.AutoModelForSeq2SeqLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
    "vit": transformers.AutoModelForImageClassification,
    "dinov2": transformers.AutoModelForImageClassification,
}


def build(model_type: str, attention: Attention) -> tuple[Any, Any]:
    """The config, dropout of attention off so that a CPU build takes the fused path, and the module in training."""
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    for name in ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = _CLASSES.get(model_type, transformers.AutoModelForCausalLM).from_config(
        config, attn_implementation=attention
    )
    config.architectures = [type(model).__name__]
    return config, model.train()


def batch_of(model_type: str, config: Any, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    """A batch, and the length that its samples have for the planner."""
    words = torch.zeros(BATCH, 256 if model_type == "whisper" else LENGTH, dtype=torch.long)
    if model_type == "whisper":
        audio = torch.zeros(BATCH, config.num_mel_bins, 2 * LENGTH, dtype=dtype)
        return {"input_features": audio, "labels": words}, 256
    if model_type in ("vit", "dinov2"):
        pixels = torch.zeros(BATCH, 3, config.image_size, config.image_size, dtype=dtype)
        labels = torch.zeros(BATCH, dtype=torch.long)
        return {"pixel_values": pixels, "labels": labels}, (config.image_size // config.patch_size) ** 2 + 1
    return {"input_ids": words, "labels": words.clone()}, LENGTH


def true_peak(model_type: str, model: Any, batch: dict[str, Any], how: tuple[Precision, Checkpointing]) -> int:
    """The most bytes alive in forward, loss and backward beside weights and inputs."""
    precision, checkpointing = how
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with StorageTracker([*model.parameters(), *model.buffers(), *batch.values()]) as tracker:
        at_rest = tracker.live_bytes
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        return tracker.peak_bytes - at_rest
