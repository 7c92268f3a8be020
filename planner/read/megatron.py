"""Megatron-Core's arguments: Megatron-LM's scripts and test cases, Primus, `megatron sft` of ms-swift, BigScience.

NVIDIA/Megatron-LM@d98e8a64 `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`;
modelscope/ms-swift@3602360a5 `swift/megatron/arguments/`; AMD-AGI/Primus@fd1eeabb `primus/configs/modules/megatron/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from planner import vocabulary as words
from planner.models.catalogue import find_model, knows_model
from planner.read.documents import Files
from planner.read.form import TWO_PRECISIONS, Notebook, Setting
from planner.read.huggingface import read_deepspeed_of, read_quantisation
from planner.read.megatron_keys import GAPS, PLAIN
from planner.read.trainers import (
    default_of,
    keys_of,
    lora_targets,
    read_optimizer,
    read_recomputed_modules,
    set_task,
    without_effect,
)

VOCABULARIES: Mapping[str, int] = {
    "gpt2bpetokenizer": 50257,
    "bertwordpiecelowercase": 30522,
    "bertwordpiececase": 28996,
    "llama2tokenizer": 32000,
    "llama3tokenizer": 128256,
    "deepseekv2tokenizer": 102400,
    "deepseekv3tokenizer": 129280,
    "mixtraltokenizer": 32000,
}
"""Tokens of the vocabularies that Megatron's tokenizer types and Primus' stand for (their models' config.json)."""
_OF_INFERENCE = (
    "prompts",
    "num_tokens_to_generate",
    "incoming_requests_per_sec",
    "inference_repeat_n",
    "max_tokens_to_oom",
)
_PREFIXES = ("MODEL_ARGS.", "modules.")
_LINEAR = frozenset({"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"})
"""Linear layers of a block as Megatron calls them."""


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the arguments of Megatron in YAML: those of its tests, or Primus'."""
    plain = {_plain(key) for key in keys}
    if "model" in keys:
        return False  # ms-swift's, which name one
    own = {"micro_batch_size", "tensor_model_parallel_size", "num_layers", "train_iters", "global_batch_size"}
    is_primus = any(key.startswith("modules.") and key.endswith(".framework") for key in keys)
    return is_primus or len(own & plain) > 2 or any(key.startswith("MODEL_ARGS.") for key in keys)


def _plain(key: str) -> str:
    """Return a key as Megatron's argument is called."""
    key = re.sub(r"^MODEL_ARGS\.", "", key)
    key = re.sub(r"^modules\.\w+\.overrides\.", "", key)
    return key.lstrip("-").replace("-", "_")


def renamed(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings under the arguments' own names."""
    listed = list(settings)
    own = any(item.key == "train.gpus" for item in listed)  # of ms-swift's Ray: what trains beside what generates
    return [replace(item, key=_plain(item.key.removeprefix("train.") if own else item.key)) for item in listed]


def why_no_training(book: Notebook) -> str:
    """Return what arguments are for where that is no training; empty where it is."""
    if any(key in book for key in _OF_INFERENCE):
        return "is for inference and trains nothing"
    kinds = [book.word(key) for key in book.settings if re.fullmatch(r"modules\.\w+\.trainer_class", key)]
    if any(kind.startswith("flux") for kind in kinds):
        return "trains a diffusion model, which no reader counts"
    framework = _framework(book)
    if framework not in ("megatron", "megatron_bridge"):
        return f"has Primus run {framework}, whose keys are not read here"
    if not {"micro_batch_size", "num_layers", "train_iters", "global_batch_size", "seq_length"} & book.settings.keys():
        return "has no batch, no layers and no steps: it is no training's"
    return ""


def _framework(book: Notebook) -> str:
    """Return the framework that Primus runs; Megatron where it is not Primus that does."""
    keys = (key for key in book.settings if re.fullmatch(r"modules\.\w+\.framework", key))
    return next(map(book.word, keys), "megatron")


def _read_modules(book: Notebook) -> None:
    """Say whose modules are counted."""
    if book.word("transformer_impl") in ("local", "inference_optimized"):
        book.leave("transformer_impl", "blocks are counted as Transformer Engine's", matters=True)
    else:
        book.become("code", "megatron", "transformer_impl")
    for key in ("hybrid_layer_pattern", "hybrid_override_pattern", "mamba_num_heads"):
        if key in book and "model_config" not in book.answers:
            book.assume("the architecture is none that arguments are counted for; --model names one", key)
            return


def read(book: Notebook, files: Files, *, is_swift: bool = False) -> None:
    """Read Megatron's arguments; of ms-swift's `megatron` commands, which name a model, with `is_swift`."""
    trainer = "megatron-swift" if is_swift else "megatron"
    if is_swift:
        book.answer("model", book.text("model"), "model")
        _read_swift(book)
    else:
        _read_model(book)
        _read_adapters(book)
    _read_modules(book)
    _read_batch(book, trainer)
    _read_degrees(book)
    _read_precision(book, is_swift=is_swift)
    _read_recomputation(book, trainer)
    read_optimizer(book, "optimizer", "adamw-fused")
    if book.answers["optimizer"] == "adamw":  # core/optimizer: Transformer Engine's or Apex's FusedAdam
        book.answer("optimizer", "adamw-fused", "optimizer")
    _read_states(book, files, trainer)
    if _framework(book) == "megatron_bridge":
        _read_bridge(book)
    backend = book.word("attention_backend")
    attention: words.Attention = (
        "eager" if backend in ("unfused", "local") else "flash" if "flash" in backend else "sdpa"
    )
    book.answer(
        "attention", "flash" if book.flag("use_flash_attn") else attention, "attention_backend", "use_flash_attn"
    )
    steps = book.whole("train_iters") or book.whole("max_steps")
    if steps is not None and steps > 0:
        book.steps = steps
        book.become("steps", steps, "train_iters")
    samples, batch = book.whole("train_samples"), book.answers.get("global_batch")
    if samples and batch:
        book.steps = samples // batch
        book.become("steps", book.steps, "train_samples")
    book.close(
        without_effect=lambda key: PLAIN.match(key) is not None or without_effect(key),
        gaps=GAPS,
        names=(),
    )


# The model.


def _read_model(book: Notebook) -> None:
    """Read the sizes of a model as transformers' config of the same shape has them."""
    preset = next((key for key in book.settings if re.fullmatch(r"modules\.\w+\.model", key)), "")
    if preset and "num_layers" not in book:
        name = re.sub(r"(_lora\w*)?(\.ya?ml)?$", "", book.text(preset) or "")
        book.answer("model", re.sub(r"^(llama)3([1-3])_", r"\1-3.\2-", name), preset)
        return
    hidden, heads = book.positive("hidden_size"), book.positive("num_attention_heads")
    if "encoder_num_layers" in book and hidden and heads:
        _read_t5(book, hidden, heads)
        return
    layers = book.positive("num_layers")
    if not layers or not hidden or not heads:
        for key in _SIZES:
            book.leave(key, "without layers, width and heads no model can be made of it", matters=True)
        return
    used = ["num_layers", "hidden_size", "num_attention_heads"]
    gates = ("activation_func", "glu_activation")  # Primus', and Megatron-DeepSpeed's of BigScience
    gated = book.flag("swiglu") or any(book.word(key).endswith("glu") for key in gates)
    width = book.positive("ffn_hidden_size")
    if width is None:  # arguments.py, validate_args: two thirds of 4 times, rounded to 64
        width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(book, heads),
        "head_dim": book.positive("kv_channels") or hidden // heads,
        "intermediate_size": width,
        "vocab_size": _vocabulary(book),
        "max_position_embeddings": book.positive("max_position_embeddings") or book.positive("seq_length") or 2048,
        "tie_word_embeddings": not book.flag("untie_embeddings_and_output_weights"),
    }
    config = _config(book, sizes, gated=gated)
    used += ["ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings", "swiglu", "normalization"]
    used += gates
    used += [
        "num_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "vocab_size",
    ]
    used += [
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "position_embedding_type",
    ]
    used += [
        "untie_embeddings_and_output_weights",
        "make_vocab_size_divisible_by",
        "pad_vocab_size_to",
        "multi_latent_attention",
    ]
    book.answers["model_config"] = config
    book.answer("model", f"a {config['model_type']} of {layers} x {hidden}", *used)


_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels"),
    *("normalization", "num_experts", "moe_shared_expert_intermediate_size"),
)


def _read_t5(book: Notebook, hidden: int, heads: int) -> None:
    """Read an encoder-decoder (`pretrain_t5.py`), whose decoder sees as many tokens as its encoder here."""
    encoder = book.positive("encoder_num_layers") or 1
    decoder = book.positive("decoder_num_layers", encoder) or encoder
    sizes = {
        "d_model": hidden,
        "num_heads": heads,
        "d_kv": book.positive("kv_channels") or hidden // heads,
        "d_ff": book.positive("ffn_hidden_size") or 4 * hidden,
        "num_layers": encoder,
        "num_decoder_layers": decoder,
        "vocab_size": _vocabulary(book),
    }
    book.answers["model_config"] = {**sizes, "model_type": "t5", "feed_forward_proj": "gelu"}
    keys = ("encoder_num_layers", "decoder_num_layers", "hidden_size", "num_attention_heads", "kv_channels")
    book.answer(
        "model", f"a t5 of {encoder} + {decoder} x {hidden}", *keys, "ffn_hidden_size", "max_position_embeddings"
    )
    book.answer("task", "seq2seq")
    book.leave("decoder_seq_length", "targets are counted as long as what is encoded", matters=True)


def _key_heads(book: Notebook, heads: int) -> int:
    groups = book.positive("num_query_groups")
    return groups if groups and (book.flag("group_query_attention") or "group_query_attention" not in book) else heads


def _vocabulary(book: Notebook) -> int:
    """Return the padded vocabulary: as given, else that of the tokenizer."""
    padded = book.positive("pad_vocab_size_to") or book.positive("padded_vocab_size")
    if padded:
        return padded
    given = book.positive("vocab_size")
    kind, name = book.word("tokenizer_type"), book.text("tokenizer_model") or book.text("tokenizer_name_or_path") or ""
    if given is None and knows_model(name):
        given = find_model(name).vocab_size
    if given is None:
        given = VOCABULARIES.get(kind)
    if given is None:
        given = VOCABULARIES["gpt2bpetokenizer"]
        book.assume(f"the vocabulary is GPT-2's {given:,}: the tokenizer's own is not known", "tokenizer_type")
    multiple = book.positive("make_vocab_size_divisible_by") or int(
        default_of("megatron", "make_vocab_size_divisible_by")
    )
    step = multiple * (book.positive("tensor_model_parallel_size") or 1)
    return -(-given // step) * step


def _config(book: Notebook, sizes: dict[str, Any], *, gated: bool) -> dict[str, Any]:
    """Return transformers' config of the nearest structure."""
    experts = book.positive("num_experts") if book.whole("num_experts") else None
    expert_width = book.positive("moe_ffn_hidden_size") or sizes["intermediate_size"]
    chosen = book.positive("moe_router_topk", int(default_of("megatron", "moe_router_topk")))
    shared = book.positive("moe_shared_expert_intermediate_size")
    rope = book.word("position_embedding_type", "learned_absolute")
    if book.flag("multi_latent_attention"):
        routed = {"n_routed_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": expert_width}
        return {
            **sizes,
            "model_type": "deepseek_v3",
            "q_lora_rank": book.positive("q_lora_rank"),
            "kv_lora_rank": book.positive("kv_lora_rank", int(default_of("megatron", "kv_lora_rank"))),
            "qk_nope_head_dim": book.positive("qk_head_dim", int(default_of("megatron", "qk_head_dim"))),
            "qk_rope_head_dim": book.positive(
                "qk_pos_emb_head_dim", int(default_of("megatron", "qk_pos_emb_head_dim"))
            ),
            "v_head_dim": book.positive("v_head_dim", int(default_of("megatron", "v_head_dim"))),
            "n_shared_experts": max((shared or 0) // expert_width, 1) if experts else 1,
            "first_k_dense_replace": _dense_layers(book) if experts else sizes["num_hidden_layers"],
            **(routed if experts else {"n_routed_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64}),
        }
    if experts:
        if not gated:
            book.assume("experts are counted with a gate, which theirs have not", "num_experts")
        if shared:
            more = {"shared_expert_intermediate_size": shared, "moe_intermediate_size": expert_width}
            return {**sizes, **more, "model_type": "qwen2_moe", "num_experts": experts, "num_experts_per_tok": chosen}
        width = {"intermediate_size": expert_width, "num_local_experts": experts, "num_experts_per_tok": chosen}
        return {**sizes, **width, "model_type": "mixtral"}
    if gated:
        return {**sizes, "model_type": "llama"}
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    if rope == "alibi":
        short = {ours: sizes[theirs] for ours, theirs in names.items() if ours != "n_embd"}
        return {"model_type": "bloom", "hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"], **short}
    if rope in ("rope", "yarn", "mrope", "none"):
        return {**sizes, "model_type": "gpt_neox"}
    short = {ours: sizes[theirs] for ours, theirs in names.items()}
    positions, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    own_head = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
    inner = {"n_inner": sizes["intermediate_size"], "n_positions": positions, "vocab_size": vocabulary}
    return {"model_type": "gpt2", **short, **inner, **own_head}


def _dense_layers(book: Notebook) -> int:
    """Return how many layers at the beginning have no experts, of a pattern such as `([0]*3+[1]*58)`."""
    match = re.match(r"\(?\[0\]\*([0-9]+)", book.text("moe_layer_freq", "") or "")
    return int(match[1]) if match else 0


# Batch, degrees, precision, recomputation, states.


def _read_batch(book: Notebook, trainer: str) -> None:
    micro = book.positive("micro_batch_size", default_of(trainer, "micro_batch_size") or 1)
    book.answer("micro_batch", micro, "micro_batch_size")
    total = book.positive("global_batch_size", default_of(trainer, "global_batch_size"))
    if total is not None:
        book.answer("global_batch", total, "global_batch_size")
    length = book.positive("seq_length") or book.positive("max_length") or book.positive("encoder_seq_length")
    if length is not None:
        book.answer("seq_len", length, "seq_length", "max_length", "encoder_seq_length")


def _read_degrees(book: Notebook) -> None:
    for field, key in (
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
        ("cp", "context_parallel_size"),
        ("ep", "expert_model_parallel_size"),
    ):
        book.answer(field, book.positive(key, 1), key)
    splits = book.flag("sequence_parallel") and book.answers["tp"] > 1
    book.answer("sequence_parallel", splits, "sequence_parallel")
    pipeline, layers = book.answers["pp"], book.positive("num_layers")
    pieces = book.positive("num_virtual_stages_per_pipeline_rank") or book.positive(
        "virtual_pipeline_model_parallel_size"
    )
    each = book.positive("num_layers_per_virtual_pipeline_stage")
    if each and layers and pipeline > 1:
        pieces = max(layers // pipeline // each, 1)
    if pieces and pieces > 1 and pipeline > 1:
        book.answer("pp_schedule", "interleaved")
        keys = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
        book.answer("virtual_stages", pieces, *keys, "num_layers_per_virtual_pipeline_stage")
    for key in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        if pipeline == 1 and key in book:
            book.leave(key, "there is no pipeline", matters=False)


_RECIPES: Mapping[str, words.Fp8Recipe] = {
    "delayed": "tensorwise",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


def _read_precision(book: Notebook, *, is_swift: bool) -> None:
    precision: words.Precision = "bf16" if is_swift else "fp32"
    if book.flag("fp16") and book.flag("bf16"):  # megatron/training/arguments.py, validate_args
        precision = "bf16"
        message = f"bf16 and fp16 are both on, which {book.trainer} refuses; keep one"
        book.find("error", TWO_PRECISIONS, message, "fp16")
    elif book.flag("fp16") or book.word("torch_dtype") == "float16":
        precision = "fp16"
    elif book.flag("bf16") or any(key.startswith("modules.") for key in book.settings):
        precision = "bf16"
    book.become("precision", precision, "bf16", "fp16", "torch_dtype")
    for key in ("fp8_format", "fp8"):
        if key in book and book.word(key) not in ("false", "none", ""):
            precision = "fp8"
            book.become("precision", "fp8", key)
    if precision == "fp8" and "fp8_recipe" in book:
        book.answer("fp8_recipe", _RECIPES.get(book.word("fp8_recipe"), "tensorwise"), "fp8_recipe")
    book.answers["precision"] = precision


def _read_recomputation(book: Notebook, trainer: str) -> None:
    default = default_of(trainer, "recompute_granularity") if trainer == "megatron-swift" else "none"
    word = book.word("recompute_granularity", str(default))
    kind: words.Checkpointing = "full" if word == "full" else "selective" if word == "selective" else "none"
    if book.flag("recompute_activations"):
        kind = "selective"
    if book.flag("checkpoint_activations"):
        kind = "full"
    book.answer("checkpointing", kind, "recompute_granularity", "recompute_activations", "checkpoint_activations")
    layers, method = book.whole("recompute_num_layers"), book.word("recompute_method")
    if kind == "full" and layers and layers > 1 and method == "uniform":
        book.answer("checkpoint_every", 1, "recompute_method")
        book.leave("recompute_num_layers", "chunks of several layers are counted as single ones", matters=True)
    elif kind == "full" and layers and method == "block":
        total = book.positive("num_layers")
        chunk = -(-(total or 0) // ((book.answers["pp"] or 1) * (book.answers.get("virtual_stages") or 1)))
        every = next((gap for gap in range(2, chunk + 1) if -(-chunk // gap) == layers), None)
        if total is not None and layers >= chunk:
            book.become("checkpointing", "of every block", "recompute_num_layers", "recompute_method")
        elif every is not None:
            book.answer("checkpoint_every", every, "recompute_num_layers")
        else:
            book.leave(
                "recompute_num_layers", f"recomputation of {layers} blocks a stage is counted of all", matters=True
            )
    book.become("checkpointing", kind, "recompute_method", "recompute_num_layers")
    if kind == "selective":
        read_recomputed_modules(book, "recompute_modules")
    else:
        book.become("checkpointing", kind, "recompute_modules")


def _read_states(book: Notebook, files: Files, trainer: str) -> None:
    if book.flag("deepspeed") or "deepspeed_config" in book:
        book.answers["code"] = "megatron-deepspeed"
        book.become("code", "megatron-deepspeed", "deepspeed")
        if "deepspeed_config" in book:
            book.answers.pop("strategy", None)
            precision = book.answers["precision"]
            read_deepspeed_of(book, "deepspeed_config", files)
            if book.answers.get("strategy") == "ddp" and precision == "bf16":
                # Megatron-DeepSpeed's BF16_Optimizer shards states at stage 0 (deepspeed/runtime/bf16_optimizer.py)
                book.answers.update(strategy="zero1", backend="deepspeed")
        stage = book.whole("zero_stage")
        if stage is not None:
            book.become("strategy", book.answers.get("strategy") or f"stage {stage}", "zero_stage")
            book.answers.setdefault("strategy", ("ddp", "zero1", "zero2", "zero3")[min(stage, 3)])
        return
    sharded = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "use_distributed_optimizer")
    shards = any(book.flag(key) for key in sharded)
    if "use_distributed_optimizer" not in book and trainer == "megatron-swift":
        shards = bool(default_of(trainer, "use_distributed_optimizer"))
    book.answer("strategy", "zero1" if shards else "ddp", "use_distributed_optimizer")


def _read_bridge(book: Notebook) -> None:
    """Read what Megatron-Bridge's recipes add, as Primus passes it on.

    NVIDIA-NeMo/Megatron-Bridge@067f987d `src/megatron/bridge/recipes/common.py`, `training/mixed_precision.py` and
    `peft/lora.py`: bf16 with the distributed optimizer, adapters of rank 32 on all linear layers.
    """
    kind = book.word("peft", "none")
    book.answer("method", "lora" if "lora" in kind else "full", "peft")
    if book.answers["method"] == "lora":
        book.answer("lora_rank", book.positive("peft.dim") or book.positive("peft_dim", 32), "peft.dim", "peft_dim")
        book.answer("lora_targets", "all-linear")
    named = book.word("precision_config", "bf16_mixed")
    if "fp8" in named:
        book.answer("precision", "fp8", "precision_config")
    book.become("precision", book.answers["precision"], "precision_config")
    if book.flag("use_distributed_optimizer", book.answers["method"] == "full"):
        book.answer("strategy", "zero1", "use_distributed_optimizer")
    if book.flag("packed_sequence"):
        book.become("packing", "samples are full", "packed_sequence")


def _read_adapters(book: Notebook) -> None:
    """Read Primus' adapters, of the modules that Megatron-Bridge names."""
    if not book.flag("lora.enabled"):
        for key in book.under("lora"):
            book.leave(key, "belongs to adapters, which are off", matters=False)
        return
    book.answer("method", "lora", "lora.enabled")
    book.answer("lora_rank", book.positive("lora.dim", 32), "lora.dim")  # megatron/bridge/peft/lora.py
    book.answer("lora_targets", "all-linear")
    targets = set((book.text("lora.target_modules") or "").replace(",", " ").split())
    if not targets or targets >= _LINEAR:
        book.become("lora_targets", "all-linear", "lora.target_modules")


def _read_swift(book: Notebook) -> None:
    """Read what ms-swift adds to Megatron's arguments: method, length, adapters, and Ray's GPUs."""
    gpus = book.positive("gpus")
    if gpus is not None:
        book.answer("gpus", gpus, "gpus")
    kind = book.word("tuner_type") or book.word("train_type") or "full"
    if kind == "full":
        book.answer("method", "full", "tuner_type", "train_type")
    else:
        book.answer("method", "lora", "tuner_type", "train_type")
        book.answer("lora_rank", book.positive("lora_rank", default_of("megatron-swift", "lora_rank")), "lora_rank")
        book.answer("lora_targets", lora_targets(book.raw("target_modules", "all-linear")), "target_modules")
    if "rlhf_type" in book:
        set_task(book, "rlhf_type", book.word("rlhf_type"))
    bits = book.whole("quant_bits")
    if bits is not None and kind != "full":
        read_quantisation(book, in_4_bits=bits == 4, in_8_bits=bits == 8, keys=("quant_bits",))
    if book.flag("packing"):
        book.become("packing", "samples are full", "packing")


def known_keys() -> frozenset[str]:
    """Return the arguments that Megatron and ms-swift have."""
    return keys_of("megatron", "megatron-swift")
