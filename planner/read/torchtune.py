"""torchtune's YAML with command-line overrides: pytorch/torchtune@bd2a0fc7c `recipes/` and `torchtune/models/`.

A recipe holds weights and states in `dtype`; recipes for several GPUs shard by FSDP2
(`recipes/full_finetune_distributed.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from planner.models.catalogue import knows_model
from planner.read.documents import Files
from planner.read.form import COMMAND, Notebook, Setting, follow_references
from planner.read.trainers import read_optimizer, set_task, without_effect

_GAPS: Mapping[str, str] = {
    "optimizer_in_bwd": "gradients are counted until the step, not until each layer's own",
    "custom_sharded_layers": "shards are counted of blocks and the rest",
    "tensor_parallel_plan": "the plan is counted as torchtune's own",
    "teacher_model": "a further model is not counted",
    "teacher_checkpointer": "a further model is not counted",
    "policy_model": "generation and further models are not counted",
    "reward_and_value_model": "generation and further models are not counted",
    "ref_checkpointer": "the frozen copy is counted as of the same model",
    "kd_loss": "a further model is not counted",
    "quantizer": "fake quantisation is not counted",
    "grpo_samples": "generation is not counted",
    "use_flex": "attention by blocks is counted as sdpa",
    "context_parallel_dim": "context parallelism is counted as dsplan's own",
    "model.use_lora_in_mlp": "the targets of adapters are counted as their other keys say",
    "model.decoder_trainable": "of models that see, the language model is counted",
    "model.encoder_trainable": "of models that see, the language model is counted",
    "model.fusion_trainable": "of models that see, the language model is counted",
    "ppo_batch_size": "a further model is not counted",
    "ac_mode": "recomputation of one in several layers is counted as of all",
    **dict.fromkeys(
        ("model.vocab_size", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.embed_dim"),
        "the model is counted as its name says",
    ),
    "model.image_size": "images are not counted",
    "model.vision_input_size": "images are not counted",
}
_PLAIN = re.compile(
    r"""(tokenizer|checkpointer|dataset|dataset_val|val_dataset|metric_logger|profiler|lr_scheduler|ref_policy_checkpointer|value_checkpointer
    |reward_checkpointer|collate_fn|output_dir|model_type|base_model_path|name|device|log_.*|save_.*|resume_.*|shuffle|epochs|max_steps.*
    |clip_grad_norm|run_val.*|batch_size_val|low_cpu_ram|max_generated.*|temperature|top_k|dataloader|ac_option|ppo_epochs|memory_efficient_fsdp.*|model\.attn_dropout|kd_ratio|lmbda|gamma|kl_coeff|whiten.*|cudnn.*
    |penalise.*|min_response.*|reward_.*|stop_token.*|num_steps|forward_batch.*|fsdp_reshard.*|use_distributed.*|device_type|safe.*
    |parallel_dims|fsdp|inference.*|num_output.*|router_.*|data|log|seed|model\.(lora_(alpha|dropout)|max_seq_len|_component_|component|use_.*)
    |optimizer\.(?!_component_).*|loss\.(?!_component_).*|enable_kv_cache|user_prompt|separate_.*)(\..*)?$""",
    re.VERBOSE,
)


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of torchtune's YAML."""
    return any(key.endswith("._component_") for key in keys)


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings with references between them followed."""
    return follow_references(settings)


def why_no_training(book: Notebook) -> str:
    """Return what a config is for where that is no training; empty where it is."""
    if "optimizer._component_" in book or "training" in book:
        return ""
    return "has no optimizer: it is for generation, evaluation or quantisation and trains nothing"


def read(book: Notebook, files: Files) -> None:
    """Read torchtune's keys."""
    component = _read_model(book)
    _read_adapters(book, component)
    _read_loss(book)
    length = book.positive("tokenizer.max_seq_len")
    if length is not None:
        book.answer("seq_len", length, "tokenizer.max_seq_len")
    else:
        book.assume("tokenizer.max_seq_len is null: samples are counted at the model's own default length")
    if "dataset.packed" in book:
        book.become(
            "packing", "samples are full" if book.flag("dataset.packed") else "as long as they are", "dataset.packed"
        )
    book.answer("micro_batch", book.positive("batch_size", 1), "batch_size")
    book.answer("grad_accum", book.positive("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
    dtype = book.word("dtype", "bf16")
    book.answer("precision", {"bf16": "bf16-pure", "fp16": "fp16"}.get(dtype, "fp32"), "dtype")
    read_optimizer(book, "optimizer._component_", "adamw")
    if book.answers["optimizer"] == "adamw" and book.flag("optimizer.fused"):
        book.answer("optimizer", "adamw-fused", "optimizer._component_", "optimizer.fused")
    recomputes = book.flag("enable_activation_checkpointing")
    book.answer("checkpointing", "full" if recomputes else "none", "enable_activation_checkpointing")
    if book.flag("enable_activation_offloading"):
        book.answer("activations_on_host", True, "enable_activation_offloading")
    if book.flag("compile"):
        book.answer("compile", True, "compile")
    paths = {setting.source.path for setting in book.settings.values()}  # recipes and configs are called alike
    is_alone = any("single_device" in name for name in (book.text(COMMAND) or "", *paths))
    book.answer("strategy", "single" if is_alone else "fsdp", COMMAND)
    if is_alone:
        book.answer("gpus", 1)
    if book.flag("fsdp_cpu_offload"):
        book.answer("offload", "all", "fsdp_cpu_offload")
    for field, key in (("tp", "tensor_parallel_dim"), ("cp", "context_parallel_dim")):
        degree = book.positive(key)
        if degree is not None and degree > 1:
            book.answer(field, degree, key)
    copies, shard = (
        book.positive("data_parallel_replicate_dim", 1) or 1,
        book.whole("data_parallel_shard_dim", -1) or -1,
    )
    if copies > 1:
        book.answer("strategy", "hsdp", "data_parallel_replicate_dim")
        book.answer("copies", copies, "data_parallel_replicate_dim")
        if shard > 1:
            book.answer("shard", shard * book.answers.get("cp", 1), "data_parallel_shard_dim")
    book.become("dp_shard", shard, "data_parallel_shard_dim")
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


def _read_model(book: Notebook) -> str:
    key = next((key for key in ("model._component_", "policy_model._component_", "model.component") if key in book), "")
    component = (book.text(key) or "").rpartition(".")[2] if key else ""
    shape = re.sub(
        r"^(q?lora|dora|qat|reward|classifier)_", "", re.sub(r"^(q?lora|dora|qat_lora|lora)_", "", component)
    )
    folder = (book.text("checkpointer.checkpoint_dir") or "").rstrip("/").rpartition("/")[2]
    name = next((name for name in (_spelt(shape), folder) if knows_model(name)), folder or _spelt(shape))
    book.answer("model", name, key or "checkpointer.checkpoint_dir")
    return component


def _spelt(component: str) -> str:
    """Return a builder's name as models are called: `llama3_1_8b` is llama-3.1-8b."""
    name = re.sub(r"(?<=[0-9])_([0-9])(?=_|$)(?!b)", r".\1", component)
    name = re.sub(r"^(llama|qwen|gemma|phi)([0-9])", r"\1-\2" if component.startswith("llama") else r"\1\2", name)
    return name.replace("_", "-")


def _read_adapters(book: Notebook, component: str) -> None:
    modules = book.raw("model.lora_attn_modules")
    if modules is None and "lora" not in component:
        return
    quantises = "qlora" in component or book.flag("model.quantize_base")
    method = "dora" if book.flag("model.use_dora") else "qlora" if quantises else "lora"
    book.answer("method", method, "model.lora_attn_modules", "model.use_dora", "model.quantize_base")
    book.answer("lora_rank", book.positive("model.lora_rank", 8), "model.lora_rank")
    targets = [str(name) for name in modules or ["q_proj", "v_proj"] if name != "output_proj"]
    targets += ["o_proj"] if "output_proj" in (modules or []) else []
    targets += ["gate_proj", "up_proj", "down_proj"] if book.flag("model.apply_lora_to_mlp") else []
    keys = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    book.answer("lora_targets", ",".join(targets), *keys)


def _read_loss(book: Notebook) -> None:
    kind = book.word("loss._component_").rpartition(".")[2]
    if "chunked" in kind or "linearcrossentropy" in kind:
        book.answer("loss", "chunked", "loss._component_")
    task = next((word for word in ("dpo", "grpo", "ppo") if word in kind), "")
    if task:
        set_task(book, "loss._component_", task)
    book.become("loss", book.answers.get("loss", "plain"), "loss._component_")
