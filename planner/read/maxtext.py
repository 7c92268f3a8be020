"""MaxText's keys, in its own YAML and as Primus' overrides of it.

AI-Hypercomputer/maxtext@e591f30c `src/maxtext/configs/base.yml`, `src/maxtext/layers/decoders.py` (remat policies) and
`src/maxtext/optimizers/optimizers.py`; AMD-AGI/Primus@fd1eeabb `primus/configs/modules/maxtext/pre_trainer.yaml`.
MaxText is compiled by XLA as a whole: what it takes is counted as torchtitan's compiled modules, and every reading says
so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from planner import limits
from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook, Setting
from planner.read.trainers import PER_NODE, read_optimizer, without_effect

_GAPS: Mapping[str, str] = {
    "quantization": "products in 8 bits are counted in 16",
    "megablox": "experts are counted as grouped products",
    "sparse_matmul": "experts are counted as grouped products",
    "capacity_factor": "experts are counted with what comes to them",
    "optimizer_memory_host_offload": "states in host memory are not counted",
    "parameter_memory_host_offload": "weights in host memory are not counted",
    "scan_layers_per_stage": "stages are counted as equal",
    "num_vocab_tiling": "logits are counted whole",
    "num_layers_per_pipeline_stage": "stages are counted as equal",
    "use_multimodal": "of models that see, the language model is counted",
    "mtp_num_layers": "layers that predict further tokens are not counted",
    "base_emb_dim": "the model is counted as its name says",
    "base_num_decoder_layers": "the model is counted as its name says",
    "base_mlp_dim": "the model is counted as its name says",
    "attention_type": "the model is counted as its name says",
}
_PLAIN = re.compile(
    r"""(run_name|base_output_directory|profiler.*|skip_first.*|upload_all.*|dataset_.*|hf_.*|grain_.*|tfds_.*|train_.*|tokeni[sz].*
    |enable_checkpointing|async_checkpointing|checkpoint_(period|is_quantized)|load_.*|packing|max_segments.*|log_.*|metrics.*|enable_goodput.*
    |use_iota_embed|scan_layers|param_scan_axis|shardy|hardware|logits_dot_in_fp32|pure_nnx.*|sharding_tolerance|moe_dispatch_no_.*
    |quantize_kvcache|kv_quant_.*|matmul_precision|cast_logits.*|adam_.*|learning_rate.*|warmup.*|gradient_clipping.*|enable_dropout|normalization_.*
    |dropout_rate|allow_split_physical_axes|(ici|dcn)_(autoregressive|diloco)_parallelism|num_slices|jax_cache.*|reuse_.*|override_model_config|env
    |sink_level|.*_sink_level|decoder_block|rope_.*|load_balance.*|collect_stack.*|data_shuffle.*|eval_.*|generate_.*|monitor_.*|tensorboard.*|vocab_size
    |modules\.\w+\.(framework|config|model)|work_group|user_name|exp_name|workspace|trainable|platform)(\..*)?$""",
    re.VERBOSE,
)
_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor", "tensor_sequence", "tensor_transpose"),
    "pp": ("pipeline",),
    "cp": ("context", "sequence", "context_usp_ulysses"),
    "ep": ("expert",),
}
"""Axes of MaxText's mesh by the degree that they are, each within a node (`ici_`) and between nodes (`dcn_`)."""
_NAMES: Mapping[str, str] = {"deepseek2-16b": "deepseek-v2-lite", "deepseek_v2_16b": "deepseek-v2-lite"}
"""Models by the names that MaxText and Primus have for them, where those are nobody else's."""


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are MaxText's keys, or Primus' of its framework."""
    plain = {_plain(key) for key in keys}
    own = {
        "per_device_batch_size",
        "max_target_length",
        "remat_policy",
        "ici_fsdp_parallelism",
        "base_output_directory",
    }
    return len(own & plain) > 2


def _plain(key: str) -> str:
    return re.sub(r"^modules\.\w+\.overrides\.", "", key)


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings under MaxText's own names."""
    return [replace(item, key=_plain(item.key)) for item in settings]


def why_no_training(book: Notebook) -> str:
    """Return what a config is for where it trains no language model; empty where it does."""
    kinds = [book.word(key) for key in book.settings if re.fullmatch(r"modules\.\w+\.framework", key)]
    if kinds and kinds[0] != "maxtext":
        return f"has Primus run {kinds[0]}, whose keys are not read here"
    return ""


def read(book: Notebook, files: Files) -> None:
    """Read MaxText's keys."""
    is_primus = any(key.startswith("modules.") for key in book.settings)
    _read_model(book)
    _read_degrees(book)
    _read_batch(book)
    _read_precision(book, is_primus=is_primus)
    policy = book.word("remat_policy", "full")
    kind: words.Checkpointing = "full" if policy == "full" else "none" if policy == "none" else "selective"
    book.answer("checkpointing", kind, "remat_policy")
    if kind == "selective":
        book.leave(
            "remat_policy", f"{policy} is counted as recomputation by torchtitan's choice of products", matters=True
        )
    attention = book.word("attention")
    book.answer("attention", "eager" if attention == "dot_product" else "flash", "attention")
    read_optimizer(book, "opt_type", "adamw-fused")
    if book.answers["optimizer"] == "adamw":  # XLA fuses optax's update
        book.answer("optimizer", "adamw-fused", "opt_type")
    book.answer("compile", True)
    whole = next((key for key in book.settings if key.endswith(".framework")), "max_target_length")
    book.leave(whole, "XLA's program is counted as torchtitan's compiled modules", matters=True)
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


def _read_model(book: Notebook) -> None:
    preset = next((key for key in book.settings if re.fullmatch(r"modules\.\w+\.model", key)), "")
    key = preset or "model_name"
    if key in book:
        name = re.sub(r"\.ya?ml$", "", book.text(key) or "")
        book.answer("model", _NAMES.get(name.lower(), name), key)


def _read_batch(book: Notebook) -> None:
    """Read the samples of a step: so many for each device, those that split a sample among them (`pyconfig.py`)."""
    samples = book.number("per_device_batch_size", 12)
    if samples is not None and not 0 < samples < limits.SAMPLES.most:
        raise book.broken("per_device_batch_size", "give a number above 0")
    if samples is not None and (samples < 1 or samples != int(samples)):
        book.leave("per_device_batch_size", "a part of a sample on a device is counted as one", matters=True)
        samples = 1
    pieces = book.positive("gradient_accumulation_steps", 1)
    sharing = prod(book.answers[field] for field in ("tp", "pp", "cp"))
    book.answer("micro_batch", int(samples or 1) * sharing, "per_device_batch_size")
    book.answer("grad_accum", pieces, "gradient_accumulation_steps")
    book.answer("seq_len", book.positive("max_target_length", 2048), "max_target_length")
    steps = book.whole("steps")
    if steps is not None and steps > 0:
        book.steps = steps
        book.become("steps", steps, "steps")


def _read_degrees(book: Notebook) -> None:
    """Read the mesh; weights and states are sharded over `fsdp` and `expert`, and copied over `data`."""
    takes_rest = False
    for field, axes in _AXES.items():
        keys = [f"{reach}_{axis}_parallelism" for axis in axes for reach in ("ici", "dcn")]
        sizes = [book.whole(key, 1) or 1 for key in keys]
        book.answer(field, prod(max(size, 1) for size in sizes), *keys)
        for key in (key for key, size in zip(keys, sizes, strict=True) if size < 0):
            book.leave(key, "the ranks that are left, which -1 takes, are counted as shards", matters=True)
            takes_rest = True
    keys = ["ici_fsdp_parallelism", "dcn_fsdp_parallelism", "ici_data_parallelism", "dcn_data_parallelism"]
    within, between, copies, far = (book.whole(key, default) for key, default in zip(keys, (-1, 1, 1, -1), strict=True))
    if within == between == 1 and not takes_rest:
        strategy: words.Strategy = "ddp"
    else:
        strategy = "fsdp" if copies == far == 1 else "hsdp"
    book.answer("strategy", strategy, *keys)
    if strategy == "hsdp":
        counted = copies if copies is not None and copies > 0 else 1
        book.answer("copies", PER_NODE if far == -1 else counted * max(far or 1, 1), *keys[2:])


def _read_precision(book: Notebook, *, is_primus: bool) -> None:
    """Read the types of products and of weights, whose type first moments have too (`mu_dtype`)."""
    computes = book.word("dtype", "bfloat16")
    kept = book.word("weight_dtype", "bfloat16" if is_primus else "float32")
    precision: words.Precision = "fp32" if computes == "float32" else "bf16-pure" if kept == "bfloat16" else "bf16"
    book.answer("precision", precision, "dtype", "weight_dtype")
