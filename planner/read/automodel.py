"""NeMo Automodel's YAML: NVIDIA-NeMo/Automodel@36044ad3 `nemo_automodel/recipes/` and `nemo_automodel/components/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook, Setting, follow_references
from planner.read.trainers import lora_targets, read_attention, read_optimizer, set_task, without_effect

_GAPS: Mapping[str, str] = {
    "packed_sequence": "samples are counted at the length that is given",
    "parallelizer": "a parallelizer of its own is counted as FSDP2",
    "autopipeline": "stages are counted as equal",
    "teacher_model": "a further model is not counted",
    "teacher_distributed": "a further model is not counted",
    "kd_loss_fn": "a further model is not counted",
    "qat": "fake quantisation is not counted",
    "fp8": "fp8 products are counted by tensor",
    "te_fp8": "fp8 products are counted by tensor",
    "model.backend": "kernels of a backend are counted as torch's",
    "model.text_config": "the model is counted as its name says",
    "model.config": "the model is counted as its config's name says",
    "model.num_hidden_layers": "the model is counted with all its layers",
    "freeze_config": "of models that see, the language model is counted",
    "distributed.pipeline": "stages are counted as equal",
    "distributed.enable_async_tensor_parallel": "exchanges of tensor parallelism are counted as exposed",
    "distributed.enable_fsdp2_prefetch": "prefetching is counted as torch's own",
    "peft.moe_rank_scaling": "adapters of experts are counted at their full rank",
    "distributed.moe": "experts are counted as FSDP2's of their ranks",
    "distributed.mp_policy": "reductions are counted in fp32",
    "distributed.defer_fsdp_grad_sync": "gradients are counted as reduced in every micro-batch",
    "distributed.defer_grad_sync": "gradients are counted as reduced in every micro-batch",
    "diffusion": "diffusion is not counted",
    "model.transformer": "diffusion is not counted",
    "flow_matching": "diffusion is not counted",
    "draft_model": "a further model is not counted",
    "target_model": "a further model is not counted",
    "recipe_args": "a draft model beside a frozen one is not counted",
    "dllm": "a diffusion language model's step is counted as one of next tokens",
    "model.dlm_paradigm": "a diffusion language model's step is counted as one of next tokens",
    "model.canvas_length": "a diffusion language model's step is counted as one of next tokens",
    "dflash": "a draft model beside a frozen one is not counted",
    "model.drafter_loss_weight": "a draft model beside it is not counted",
    "model.num_nextn_predict_layers": "layers that predict further tokens are not counted",
    "distributed.multimodal": "of models that see, the language model is counted",
    "distributed.enable_compile": "blocks are counted as not compiled",
    "distributed.autocast_dtype": "weights are counted as cast before each block, not by autocast",
    "autocast": "weights are counted as cast before each block, not by autocast",
    "distributed.fsdp2_forward_prefetch_depth": "prefetching is counted as torch's own",
    "distributed.fsdp2_backward_prefetch_depth": "prefetching is counted as torch's own",
    "model.do_distributed_inbatch_negative": "negatives of other ranks are not counted",
    "model.freeze_router": "all weights are counted as trained",
    "ema": "a further copy of the weights is not counted",
    **dict.fromkeys(
        ("model.num_labels", "model.pooling", "model.l2_normalize"),
        "a head of its own is counted as the language model's",
    ),
    **dict.fromkeys(
        ("distill_loss", "mse_loss", "infonce_distill_loss", "model.teacher_hidden_size"),
        "a further model is not counted",
    ),
    "offload_teacher_model": "a further model is not counted",
    **dict.fromkeys(
        ("model.n_embd", "model.n_layer", "model.n_head", "model.vocab_size", "model.n_positions"),
        "the model is counted as its name says",
    ),
    **dict.fromkeys(("model.init_mode", "model.layer_module", "model.stage"), "the model is counted as its name says"),
    "model.vae_encode_micro_batch_size": "images are not counted",
    "model.base_activation_checkpointing": "recomputation of the frozen base is counted as the model's",
    "distributed_config": "a second `distributed_config` is not read",
    "model.extract_submodel": "of models that see, the language model is counted",
    "dataset.seq_length": "samples are counted at this length",
}
_PLAIN = re.compile(
    r"""(recipe|dist_env|rng|ci|dataloader|validation_.*|_validation.*|dataset|checkpoint|lr_scheduler|wandb|mlflow|comet|nvtx|seed|benchmark
    |clip_grad_norm|tokenizer|skypilot|slurm|processor|logger|tool_call.*|prewarm|neftune|kd_ratio|separate_meshes|max_grad_norm|logging
    |step_scheduler\.(?!global_batch|local_batch|max_steps).*|optimizer\.(?!_target_).*|loss_fn\.(?!_target_).*|packed_sequence\.(packing|max_packs|split).*
    |distributed\.(strategy|sequence_parallel|use_hf.*|dp_size|dp_replicate_size|activation_checkpointing.*|.*reshard.*|patch.*|backend|timeout.*)
    |moe_metrics|longalign|embedding_row_repair|.*_loss_weight|distributed\.(find_unused.*|static_graph|bucket_cap.*|gradient_as.*|offload_policy\._target_)
    |model\.(load_base_model|mtp_use_repeated.*|router_aux.*|self_conditioning|block_size|kda_mode|bos_.*|eos_.*|llm_qk.*|copy_init.*|max_latent.*
        |detach_dist.*|temperature|capture_layers|_target_|trust_remote_code|cache_dir|revision|torch_dtype|output_hidden.*|use_cache|is_meta.*|use_liger.*|tie_.*|dtype|pad_token.*
        |use_sdpa_patching|force_hf|mtp_loss_scaling_factor)
    |peft\.(_target_|alpha|dropout.*|use_triton|lora_A.*|exclude_modules|lora_dtype|use_memory.*)|compile\..*|quantization\..*)(\..*)?$""",
    re.VERBOSE,
)


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of Automodel's YAML."""
    if any(key.startswith(("flow_matching.", "recipe_args.")) for key in keys) and "dist_env.backend" in keys:
        return True
    return "model._target_" in keys or ("recipe" in keys and any(key.startswith("step_scheduler.") for key in keys))


def why_no_training(book: Notebook) -> str:
    """Return what a config is for where nothing of it is counted here; empty where it is."""
    if (
        any(any(book.under(section)) for section in ("flow_matching", "fsdp", "inference"))
        and "step_scheduler.max_steps" not in book
    ):
        return "trains or runs a diffusion model, which no reader counts"
    if any(book.under("recipe_args")):
        return "trains a draft model beside a frozen one, which no reader counts"
    return ""


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings with references between them followed."""
    return follow_references(settings)


def read(book: Notebook, files: Files) -> None:
    """Read Automodel's sections."""
    _read_model(book)
    micro = book.positive("step_scheduler.local_batch_size", 1)
    book.answer("micro_batch", micro, "step_scheduler.local_batch_size")
    total = book.positive("step_scheduler.global_batch_size")
    if total is not None:
        book.answer("global_batch", total, "step_scheduler.global_batch_size")
    steps = book.positive("step_scheduler.max_steps")
    if steps:
        book.steps = steps
        book.become("steps", steps, "step_scheduler.max_steps")
    lengths = (
        "packed_sequence.packed_sequence_size",
        "dataset.seq_length",
        "dataset.seq_len",
        "dataset.max_seq_length",
    )
    length = next((value for key in lengths if (value := book.whole(key)) and value > 0), None)
    if length is not None:
        book.answer("seq_len", length, *lengths)
    else:
        book.assume("no key says how long samples are; the model's own length counts")
        for key in lengths:
            book.leave(key, "samples are as long as they are", matters=False)
    _read_peft(book)
    _read_sharding(book)
    loss = book.word("loss_fn._target_").rpartition(".")[2]
    kind: words.Loss = (
        "fused" if "fusedlinear" in loss or "liger" in loss else "chunked" if "chunked" in loss else "plain"
    )
    book.answer("loss", kind, "loss_fn._target_")
    read_optimizer(book, "optimizer._target_", "adamw")
    if book.flag("compile.enabled"):
        book.answer("compile", True, "compile.enabled")
    if "kd" in book.word("recipe"):
        set_task(book, "recipe", "distillation")
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


def _read_model(book: Notebook) -> None:
    keys = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
    for key in keys:
        if key in book:
            book.answer("model", book.text(key), key)
            break
    read_attention(book, "model.attn_implementation")
    dtype = (book.word("model.torch_dtype") or book.word("model.dtype") or "bf16").rpartition(".")[2]
    book.answer("precision", "fp32" if dtype in ("float32", "fp32") else "bf16", "model.torch_dtype", "model.dtype")
    if book.flag("fp8.enabled"):
        book.answer("precision", "fp8", "fp8.enabled")
    if any(book.under("quantization")) and book.flag("quantization.load_in_4bit"):
        book.answer("load_dtype", "nf4", "quantization.load_in_4bit")


def _read_peft(book: Notebook) -> None:
    if not any(book.under("peft")):
        return
    quantised = book.answers.get("load_dtype") == "nf4"
    book.answer("method", "dora" if book.flag("peft.use_dora") else "qlora" if quantised else "lora", "peft.dim")
    book.answer("lora_rank", book.positive("peft.dim", 8), "peft.dim")
    targets = book.raw("peft.target_modules")
    if book.flag("peft.match_all_linear") or not targets or targets in ("*_proj", ["*_proj"]):
        book.answer("lora_targets", "all-linear", "peft.match_all_linear", "peft.target_modules")
    else:
        names = targets if isinstance(targets, list) else [targets]
        plain = [str(name).rpartition(".")[2].lstrip("*") for name in names]
        book.answer("lora_targets", lora_targets(plain), "peft.target_modules")


def _read_sharding(book: Notebook) -> None:
    section = "distributed."
    word = book.word(f"{section}strategy") or book.word(f"{section}_target_") or "fsdp2"
    replicate = book.positive(f"{section}dp_replicate_size", 1) or 1
    strategy: words.Strategy = "ddp" if "ddp" in word else "hsdp" if replicate > 1 else "fsdp"
    book.answer("strategy", strategy, f"{section}strategy", f"{section}_target_", f"{section}dp_replicate_size")
    if strategy == "hsdp":
        book.answer("copies", replicate, f"{section}dp_replicate_size")
    if "megatron" in word:
        book.leave(f"{section}strategy", "Megatron-FSDP is counted as FSDP2", matters=True)
    for field in ("tp", "cp", "pp", "ep"):
        key = f"{section}{field}_size"
        degree = book.whole(key, 1) or 1
        book.answer(field, max(degree, 1), key)
    if book.flag(f"{section}sequence_parallel") and book.answers["tp"] > 1:
        book.answer("sequence_parallel", True, f"{section}sequence_parallel")
    for key in (f"{section}activation_checkpointing", "model.activation_checkpointing"):
        if key in book:
            book.answer("checkpointing", _recomputed(book, key), key)
    for key in (f"{section}offload_policy", f"{section}cpu_offload"):
        if key in book or any(book.under(key)):
            book.answer("offload", "all", key)


def _recomputed(book: Notebook, key: str) -> words.Checkpointing:
    """Return what is recomputed: `_normalize_activation_checkpointing` of `nemo_automodel/recipes/_dist_utils.py`."""
    word = book.word(key)
    if word in ("full", "enabled"):
        return "full"
    if word == "selective":
        return "selective"
    return "full" if word not in ("none", "disabled") and book.flag(key) else "none"
