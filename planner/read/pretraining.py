"""nanotron's YAML and llm-foundry's.

huggingface/nanotron@2411b022 `src/nanotron/config/`, mosaicml/llm-foundry@8c8dd48f `llmfoundry/command_utils/train.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook, Setting, follow_references
from planner.read.sharding import read_fsdp
from planner.read.trainers import lora_targets, read_attention, read_optimizer, without_effect

_NANOTRON_GAPS: Mapping[str, str] = {
    "parallelism.expert_parallel_size": "experts are counted whole on their ranks",
    "model.model_config.rope_interleaved": "rotary embeddings are counted as transformers' own",
    "parallelism.tp_recompute_allgather": "what is all-gathered again is counted as kept",
}
_NANOTRON_PLAIN = re.compile(
    r"(checkpoints|data|doremi|data_stages|general|lighteval|logging|profiler|tokenizer|metrics_logging|s3_upload|model|optimizer|tokens|parallelism)(\..*)?$"
)
_FOUNDRY_GAPS: Mapping[str, str] = {
    "model.loss_fn": "the loss is counted as torch's own",
    "model.config_overrides": "changes of the model's own config are not counted",
    "fsdp_config.activation_cpu_offload": "activations in host memory are not counted",
    "fsdp_config.limit_all_gathers": "",
    "tp_config": "tensor parallelism is counted as dsplan's own",
    "train_loader.dataset.packing_ratio": "samples are counted at their full length",
    "model.ffn_config": "experts are counted as the model's name says",
}
_FOUNDRY_PLAIN = re.compile(
    r"(train_loader|eval_.*|scheduler|algorithms|callbacks|loggers|tokenizer|variables|optimizer|seed|run_name|data_.*|max_seq_len|icl_.*"
    r"|console.*|progress.*|log_.*|python.*|save_.*|load_.*|autoresume|dist_timeout|device_eval.*|global_seed|expandable.*|compile_config"
    r"|model|fsdp_config|profiler|metadata|only_.*|icl|spin.*)(\..*)?$"
)


def is_nanotron(keys: frozenset[str]) -> bool:
    """Return whether these are nanotron's sections."""
    return "tokens.micro_batch_size" in keys and any(key.startswith("parallelism.") for key in keys)


def is_foundry(keys: frozenset[str]) -> bool:
    """Return whether these are llm-foundry's keys."""
    return "model.name" in keys and any(key.startswith("train_loader.") for key in keys)


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings with references between them followed."""
    return follow_references(settings)


def read(book: Notebook, files: Files) -> None:
    """Read either's keys."""
    if is_nanotron(frozenset(book.settings)):
        _read_nanotron(book)
    else:
        _read_foundry(book)


def _read_nanotron(book: Notebook) -> None:
    section = "model.model_config."
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: book.positive(f"{section}{name}") for name in (*names, "vocab_size", "max_position_embeddings")}
    if sizes["hidden_size"] and sizes["num_hidden_layers"]:
        tied = book.flag(f"{section}tie_word_embeddings")
        config = {name: value for name, value in sizes.items() if value is not None}
        book.answers["model_config"] = {**config, "model_type": "llama", "tie_word_embeddings": tied}
        title = f"a llama of {sizes['num_hidden_layers']} x {sizes['hidden_size']}"
        book.answer("model", title, *(f"{section}{name}" for name in (*sizes, "tie_word_embeddings")))
    for field, key in (
        ("micro_batch", "tokens.micro_batch_size"),
        ("grad_accum", "tokens.batch_accumulation_per_replica"),
        ("seq_len", "tokens.sequence_length"),
    ):
        book.answer(field, book.positive(key, 1), key)
    steps = book.positive("tokens.train_steps")
    if steps:
        book.steps = steps
        book.become("steps", steps, "tokens.train_steps")
    degrees = {field: book.positive(f"parallelism.{name}", 1) or 1 for field, name in _DEGREES}
    for field, name in _DEGREES:
        if field != "dp":
            book.answer(field, degrees[field], f"parallelism.{name}")
    ranks = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    book.answer("gpus", ranks, "parallelism.dp")
    if "parallelism.tp_mode" in book and degrees["tp"] > 1:
        splits = book.word("parallelism.tp_mode") == "reduce_scatter"
        book.answer("sequence_parallel", splits, "parallelism.tp_mode")
    stage = book.whole("optimizer.zero_stage", 0)
    book.answer("strategy", "zero1" if stage else "ddp", "optimizer.zero_stage")
    dtype = book.word("model.dtype", "bfloat16")
    book.answer("precision", {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32"), "model.dtype")
    read_attention(book, f"{section}_attn_implementation", "flash")
    read_optimizer(book, "optimizer.optimizer_factory.name", "adamw")
    if book.answers["optimizer"] == "adamw" and book.flag("optimizer.optimizer_factory.torch_adam_is_fused"):
        book.answer("optimizer", "adamw-fused", "optimizer.optimizer_factory.torch_adam_is_fused")
    recomputes = book.flag("parallelism.recompute_layer")
    book.answer("checkpointing", "full" if recomputes else "none", "parallelism.recompute_layer")
    book.close(without_effect=lambda key: _NANOTRON_PLAIN.match(key) is not None, gaps=_NANOTRON_GAPS, names=())


_DEGREES = (("dp", "dp"), ("tp", "tp"), ("pp", "pp"), ("cp", "context_parallel_size"))


def _read_foundry(book: Notebook) -> None:
    _read_foundry_model(book)
    length = book.positive("max_seq_len") or book.positive("variables.max_seq_len")
    if length is not None:
        book.answer("seq_len", length, "max_seq_len", "variables.max_seq_len")
    micro, total = book.positive("device_train_microbatch_size"), book.positive("global_train_batch_size")
    if micro is None and "device_train_microbatch_size" in book:
        book.become("micro_batch", "auto", "device_train_microbatch_size")
        book.assume("Composer halves the micro-batch until it fits; 1 is counted", "device_train_microbatch_size")
    book.answer("micro_batch", micro or 1, "device_train_microbatch_size")
    if total is not None:
        book.answer("global_batch", total, "global_train_batch_size")
    word = book.word("precision", "amp_bf16")
    precision: words.Precision = (
        "fp8" if "fp8" in word else "bf16" if "bf16" in word else "fp16" if "fp16" in word else "fp32"
    )
    book.answer("precision", precision, "precision")
    read_optimizer(book, "optimizer.name", "adamw")
    match = re.fullmatch(r"([0-9]+)ba", book.word("max_duration"))
    if match:
        book.steps = int(match[1])
    book.become("steps", book.word("max_duration"), "max_duration")
    if any(book.under("fsdp_config")):
        read_fsdp(book, "fsdp_config")
        for key in ("fsdp_config.mixed_precision", "fsdp_config.activation_checkpointing_reentrant"):
            book.become("precision", book.word(key), key)
        if book.word("fsdp_config.mixed_precision") == "pure":
            book.become("precision", "bf16 reductions", "fsdp_config.mixed_precision")
    if any(book.under("model.peft_config")):
        book.answer("method", "lora", "model.peft_config.peft_type")
        book.answer("lora_rank", book.positive("model.peft_config.r", 8), "model.peft_config.r")
        targets = lora_targets(book.raw("model.peft_config.target_modules", "all-linear"))
        book.answer("lora_targets", targets, "model.peft_config.target_modules")
    book.close(
        without_effect=lambda key: _FOUNDRY_PLAIN.match(key) is not None or without_effect(key),
        gaps=_FOUNDRY_GAPS,
        names=(),
    )


def _read_foundry_model(book: Notebook) -> None:
    key = "model.pretrained_model_name_or_path"
    if key in book:
        book.answer("model", book.text(key), key, "model.name", "model.pretrained")
    elif book.word("model.name") == "mpt_causal_lm":
        names = {"d_model": "d_model", "n_heads": "n_heads", "n_layers": "n_layers", "vocab_size": "vocab_size"}
        sizes = {theirs: book.positive(f"model.{ours}") for ours, theirs in names.items()}
        ratio = book.positive("model.expansion_ratio", 4) or 4
        if all(sizes.values()):
            length = book.positive("model.max_seq_len") or 2048
            more = {"model_type": "mpt", "expansion_ratio": ratio, "max_seq_len": length}
            book.answers["model_config"] = {**sizes, **more}
            keys = tuple(f"model.{name}" for name in (*names, "expansion_ratio", "max_seq_len", "name"))
            book.answer("model", f"an mpt of {sizes['n_layers']} x {sizes['d_model']}", *keys)
    attention = book.word("model.attn_config.attn_impl") or book.word("model.config_overrides.attn_config.attn_impl")
    if attention:
        value: words.Attention = "flash" if attention == "flash" else "eager"
        keys = ("model.attn_config.attn_impl", "model.config_overrides.attn_config.attn_impl")
        book.answer("attention", value, *keys)
