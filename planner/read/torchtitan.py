"""torchtitan's registry, TOML and flags, and Primus' YAML of the same keys.

pytorch/torchtitan@b5bcd76c `torchtitan/config/configs.py`, whose batches are counted in tokens, and
`torchtitan/trainer.py`; of older releases `torchtitan/config/job_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook, Setting, Unresolved
from planner.read.trainers import lora_targets, read_optimizer, without_effect

_GAPS: Mapping[str, str] = {
    "parallelism.pipeline_parallel_layers_per_stage": "stages are counted as equal",
    "parallelism.pipeline_parallel_first_stage_less_layers": "stages are counted as equal",
    "parallelism.pipeline_parallel_last_stage_less_layers": "stages are counted as equal",
    "parallelism.enable_async_tensor_parallel": "tensor parallelism is counted without its overlap",
    "parallelism.expert_tensor_parallel_degree": "experts are counted whole on their ranks",
    "memory_estimation": "torchtitan's own estimate is not made here",
    "experimental": "what an extension changes is not counted",
    "primus_turbo": "Primus Turbo's kernels are counted as torch's",
    "quantize": "products of a recipe are counted by tensor",
    "model.converters": "converters are counted where they are of fp8",
    "optimizer.early_step_in_backward": "gradients are counted until the step",
}
_PLAIN = re.compile(
    r"""(job|profiling|metrics|lr_scheduler|checkpoint|comm|fault_tolerance|validation|validator|debug|sink_level|.*_sink_level|trainer
    |model\.(print.*|tokenizer.*|hf_assets.*|norm_type|name|flavor|use_flex.*)|training\.(dataset.*|gc_.*|seed|deterministic|max_norm
    |mock_data|enable_.*|data.*|debug.*|mixed_precision_reduce|warmup.*)|optimizer\.(lr|beta.*|eps|weight_decay|fused|foreach)
    |compile\.(components|backend)|module|dataloader|profiler|tokenizer|hf_assets_path|dump_folder|loss
    |training\.disable_cuda_graphs|parallelism\.(spmd_backend|enable_sequence.*|context_parallel_load.*|context_parallel_ptrr.*)
    |model\.(attn_backend|moe_comm_backend)|lora\..*|activation_checkpoint\.(early_stop|per_op.*|selective.*|memory_budget|visualize.*)|float8\..*|quantize\..*\.fil.*
    |parallelism\.(context_parallel_rotate.*|fsdp_reshard.*|module.*|disable_loss.*|enable_compiled.*|enable_loss.*|pipeline_parallel_split.*)
    |modules\.\w+\.(framework|config|model)|work_group|user_name|exp_name|workspace|rank|config)(\..*)?$""",
    re.VERBOSE,
)
_SCHEDULES: Mapping[str, words.Schedule] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "zbvzerobubble": "zero-bubble",
}


_IMPLEMENTATIONS: Mapping[str, words.Optimizer] = {
    "fused": "adamw-fused",
    "fused_opt_states_bf16": "adamw-fused",
    "foreach": "adamw",
    "for-loop": "adamw-forloop",
}


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are torchtitan's sections, or Primus' of its framework."""
    plain = {_plain(key) for key in keys}
    own = {
        "training.local_batch_size",
        "training.seq_len",
        "model.flavor",
        "activation_checkpoint.mode",
        "training.batch_size",
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.max_context_length",
    }
    return len(own & plain) > 1


def _plain(key: str) -> str:
    return re.sub(r"^modules\.\w+\.overrides\.", "", key)


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings under torchtitan's own names."""
    return [replace(item, key=_plain(item.key)) for item in settings]


def read(book: Notebook, files: Files) -> None:
    """Read torchtitan's sections."""
    _read_model(book)
    _read_degrees(book)
    if _TOKENS in book or _CONTEXT in book:
        _read_tokens(book)
    else:
        _read_samples(book)
    steps = book.positive("training.steps")
    if steps:
        book.steps = steps
        book.become("steps", steps, "training.steps")
    _read_recomputation(book)
    for key in ("compile.enable", "training.compile", "model.compile"):
        if book.flag(key):
            book.answer("compile", True, key)
    _read_precision(book)
    _read_optimizer(book)
    if book.word("loss").startswith("chunked"):
        book.answer("loss", "chunked", "loss")
    if "lora" in book.word("model.converters"):
        book.answer("method", "lora", "model.converters")
        book.answer("lora_rank", book.positive("lora.rank", 8), "lora.rank")
        if "lora.target_modules" in book:
            book.answer("lora_targets", lora_targets(book.raw("lora.target_modules")), "lora.target_modules")
    for key, setting in book.settings.items():
        if key.startswith("line ") and isinstance(setting.value, Unresolved):  # of a registry
            book.leave(key, f"{setting.value.text!r} is not followed", matters=True)
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


_TOKENS, _CONTEXT = "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"


def _read_tokens(book: Notebook) -> None:
    """Read batches that are counted in tokens; a sample is one whole context."""
    tokens, context = book.positive(_TOKENS, 16384) or 1, book.positive(_CONTEXT, 2048) or 1
    length = min(tokens, context)
    book.answer("seq_len", length, _CONTEXT)
    book.answer("micro_batch", tokens // length, _TOKENS)
    if book.answers["pp"] > 1:
        book.answer("grad_accum", book.positive(_PIECES, 1), _PIECES)
    else:
        book.leave(_PIECES, "counts under a pipeline only", matters=False)
    total = book.whole("training.num_tokens_per_train_step", -1)
    if total is not None and total > 0:
        book.answer("global_batch", total // length, "training.num_tokens_per_train_step")
        book.answers.pop("grad_accum", None)


_PIECES = "parallelism.num_pp_microbatches"


def _read_samples(book: Notebook) -> None:
    """Read batches as releases before that count them."""
    micro = "training.local_batch_size" if "training.local_batch_size" in book else "training.batch_size"
    at_once = book.positive(micro, 8)
    if book.answers["pp"] > 1:  # the schedule cuts the samples of a rank's step
        piece = "parallelism.pipeline_parallel_microbatch_size"
        book.answer("micro_batch", book.positive(piece, 1), piece, micro)
        book.answer("grad_accum", (at_once or 1) // book.answers["micro_batch"], micro)
    else:
        book.answer("micro_batch", at_once, micro)
    total = book.whole("training.global_batch_size", -1)
    if total is not None and total > 0:
        book.answer("global_batch", total, "training.global_batch_size")
    book.answer("seq_len", book.positive("training.seq_len", 2048), "training.seq_len")


def _read_recomputation(book: Notebook) -> None:
    mode, key = book.word("activation_checkpoint.mode", "none"), "activation_checkpoint.mode"
    book.answer("checkpointing", mode if mode in ("none", "full", "selective") else "full", key)
    if mode == "selective" and book.word("activation_checkpoint.selective_ac_option", "op").isdigit():
        every = book.positive("activation_checkpoint.selective_ac_option") or 1
        book.answers["checkpointing"] = "full"
        book.answer("checkpoint_every", every, "activation_checkpoint.selective_ac_option")


def _read_optimizer(book: Notebook) -> None:
    if book.word("optimizer") == "default_adamw":  # of a registry
        book.answer("optimizer", "adamw-fused", "optimizer")
        return
    read_optimizer(book, "optimizer.name", "adamw-fused")
    if book.answers["optimizer"].startswith("adamw"):
        kind = _IMPLEMENTATIONS.get(book.word("optimizer.implementation", "fused"), "adamw-fused")
        book.answer("optimizer", kind, "optimizer.name", "optimizer.implementation")


def _read_model(book: Notebook) -> None:
    preset = next((key for key in book.settings if re.fullmatch(r"modules\.\w+\.model", key)), "")
    if preset:
        book.answer("model", re.sub(r"\.ya?ml$", "", book.text(preset) or ""), preset)
        return
    assets = (book.text("hf_assets_path") or "").rstrip("/").rpartition("/")[2]
    if assets and "tokenizer" not in assets:
        book.answer("model", assets, "hf_assets_path", "model.flavor")
        return
    name, flavor = book.text("model.name") or "", book.text("model.flavor") or ""
    if name and flavor:
        spelt = re.sub(r"^llama3(_\w+)?$", "llama-3.1", name) if name.startswith("llama3") else name
        book.answer("model", f"{spelt}-{flavor}".lower(), "model.name", "model.flavor")


def _read_degrees(book: Notebook) -> None:
    section = "parallelism."
    replicate = book.positive(f"{section}data_parallel_replicate_degree", 1) or 1
    shard = book.whole(f"{section}data_parallel_shard_degree", -1)
    if shard is None or shard < -1 or shard == 0:
        raise book.broken(f"{section}data_parallel_shard_degree", "give -1 or a whole number of at least 1")
    # Ranks of cp are among those that share states: with them it is HSDP, and without shards DDP.
    context = book.positive(f"{section}context_parallel_degree", 1) or 1
    strategy: words.Strategy = "fsdp" if replicate == 1 else "ddp" if shard == context == 1 else "hsdp"
    keys = (f"{section}data_parallel_replicate_degree", f"{section}data_parallel_shard_degree")
    book.answer("strategy", strategy, *keys)
    for field, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        key = f"{section}{name}_parallel_degree"
        book.answer(field, book.positive(key, 1), key)
    if replicate == shard == 1 and all(book.answers[field] == 1 for field in words.DEGREES):
        book.answer("strategy", "single", *keys)
    elif strategy == "hsdp":
        book.answer("copies", replicate, keys[0])
        if shard > 0:
            book.answer("shard", shard * context, keys[1])
    if shard > 0:  # the degrees multiply to the ranks (`ParallelDims._validate`)
        book.answer("gpus", replicate * shard * prod(book.answers[field] for field in ("tp", "pp", "cp")), keys[1])
    if book.answers["pp"] > 1:
        key = f"{section}pipeline_parallel_schedule"
        schedule = _SCHEDULES.get(book.word(key, "1f1b"), "1f1b")
        book.answer("pp_schedule", schedule, key)
        if schedule == "interleaved":
            book.answers["virtual_stages"] = 2
    for name in ("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"):
        book.become("pp_schedule", book.answers.get("pp_schedule", "none"), f"{section}{name}")
    if book.flag("training.enable_cpu_offload"):
        book.answer("offload", "all", "training.enable_cpu_offload")
    reshard = book.word(f"{section}fsdp_reshard_after_forward", "default")
    if reshard == "never" and strategy == "fsdp" and book.answers["pp"] == 1:  # which is a pipeline's default
        book.answer("strategy", "fsdp-grad-op", f"{section}fsdp_reshard_after_forward")


def _read_precision(book: Notebook) -> None:
    word = book.word("training.mixed_precision_param", "bfloat16")
    precision: words.Precision = "fp32" if word == "float32" else "bf16"
    if book.word("training.dtype", "float32") == "bfloat16":
        precision = "bf16-pure"
    converters = book.text("model.converters", "") or ""
    recipes = [key for key in book.settings if key.startswith(("float8.", "quantize."))]
    if "float8" in converters.lower() or "mx" in converters.lower():
        precision = "fp8"
        name = next((book.word(key) for key in recipes if key.endswith("recipe_name")), "tensorwise")
        book.answer("fp8_recipe", name if name in words.FP8_RECIPES else "tensorwise", *recipes[:1])
    if "nvfp4" in converters.lower():
        book.leave("model.converters", "products in NVFP4 are counted as of bf16", matters=True)
    keys = ("training.mixed_precision_param", "training.dtype", "model.converters")
    book.answer("precision", precision, *keys)
