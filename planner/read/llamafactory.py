"""LLaMA-Factory's YAML and flags: hiyouga/LLaMA-Factory@ff6d4d12e `src/llamafactory/hparams/`.

Weights that are trained are cast to fp32 unless `pure_bf16` (`model/adapter.py`, `init_adapter`).
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.read.documents import Files
from planner.read.form import Notebook
from planner.read.huggingface import GAPS, Loading, read_deepspeed_of, read_quantisation, read_training
from planner.read.trainers import (
    default_of,
    keys_of,
    lora_targets,
    read_attention,
    set_task,
    without_effect,
)

_GAPS: Mapping[str, str] = {
    **GAPS,
    "freeze_vision_tower": "of models that see, the language model is counted",
    "freeze_multi_modal_projector": "of models that see, the language model is counted",
    "freeze_language_model": "of models that see, the language model is counted",
    "freeze_trainable_layers": "freeze: all weights are counted as trained",
    "additional_target": "what is trained whole beside the adapters is not counted",
    "use_llama_pro": "LLaMA Pro's new blocks are not counted",
    "use_adam_mini": "Adam-mini's few states are counted as Adam's",
    "mixture_of_depths": "every block is counted for every token",
    "use_kt": "KTransformers' experts on the CPU are not counted",
    "kt_config": "KTransformers' experts on the CPU are not counted",
    "use_megatron_bridge": "Megatron Bridge's own degrees are not counted",
    "image_max_pixels": "images are not counted",
    "video_max_pixels": "images are not counted",
    "video_maxlen": "images are not counted",
    "video_fps": "images are not counted",
    "shift_attn": "shifted attention is counted as attention over all tokens",
    "use_unsloth": "Unsloth's kernels are not counted",
    "use_unsloth_gc": "activations in host memory are not counted",
    "oft_block_size": "OFT is counted as LoRA",
    "oft_rank": "OFT is counted as LoRA",
    "fp8": "torchao's fp8 products are counted by tensor",
    "fp8_enable_fsdp_float8_all_gather": "weights are counted in 16 bit between ranks",
    "moe_aux_loss_coef": "the router's loss is not counted",
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "context_parallel_size",
        ),
        "degrees of Megatron-Core are not counted",
    ),
    **dict.fromkeys(
        ("use_distributed_optimizer", "sequence_parallel", "recompute_granularity"),
        "Megatron-Core's way is not counted",
    ),
    "use_packed_sequences": "samples are counted at their full length",
    "freeze_trainable_modules": "freeze: all weights are counted as trained",
    "use_v1_kernels": "fused kernels are counted as transformers' own",
    "kt_cpu_activation": "KTransformers' experts on the CPU are not counted",
    "ray_num_workers": "ranks are counted as torch's own launcher starts them",
}
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_PLAIN = frozenset(
    {
        *("template", "dataset", "dataset_dir", "plot_loss", "stage", "do_train", "trust_remote_code", "max_samples"),
        *(
            "loraplus_lr_ratio",
            "loraplus_lr_embedding",
            "pissa_init",
            "pissa_iter",
            "pissa_convert",
            "create_new_adapter",
        ),
        *(
            "bias_activation_fusion",
            "apply_rope_fusion",
            "overlap_param_gather",
            "overlap_grad_reduce",
            "moe_grouped_gemm",
            "moe_token_dispatcher_type",
            "export_hf_on_finish",
            "apollo_scale",
        ),
        *(
            "adapter_name_or_path",
            "enable_thinking",
            "pref_beta",
            "pref_loss",
            "pref_ftx",
            "galore_layerwise",
            "double_quantization",
        ),
        *(
            "galore_target",
            "galore_rank",
            "galore_scale",
            "apollo_layerwise",
            "apollo_target",
            "apollo_rank",
            "apollo_scale_type",
        ),
        *(
            "badam_mode",
            "badam_switch_mode",
            "badam_switch_interval",
            "use_dft_loss",
            "use_asft_loss",
            "asft_alpha",
            "use_eaft_loss",
        ),
        *(
            "upcast_layernorm",
            "rope_scaling",
            "resize_vocab",
            "new_special_tokens_config",
            "add_special_tokens",
            "ref_model_adapters",
        ),
        *(
            "predict_with_generate",
            "export_dir",
            "export_size",
            "export_device",
            "export_legacy_format",
            "use_reentrant_gc",
        ),
        *(
            "eaft_alpha",
            "freeze_extra_modules",
            "fp8_backend",
            "module_dropout",
            "oft_target",
            "quantization_method",
            "init_special_tokens",
        ),
        *(
            "num_train_epochs",
            "packing",
            "tokenized_path",
            "init_config",
            "sample_backend",
            "same_network",
            "fsdp",
            "low_cpu_mem_usage",
        ),
    }
)


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of LLaMA-Factory's YAML."""
    if {"model", "train_dataset"} <= keys or {"model_class", "cutoff_len"} <= keys:
        return True  # of its next major version
    own = {"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "quantization_bit", "lora_target"}
    return "model_name_or_path" in keys and not own.isdisjoint(keys)


def why_no_training(book: Notebook) -> str:
    """Return what a config of LLaMA-Factory is for where that is no training; empty where it is."""
    if "export_dir" in book:
        return "merges adapters or quantises a model and trains nothing"
    if "model_name_or_path" not in book:
        return "" if "train_dataset" in book else "has no train_dataset: it is for sampling or exporting"
    if "do_train" in book and not book.flag("do_train"):
        return "has do_train: false and trains nothing"
    if "do_train" not in book and "per_device_train_batch_size" not in book:
        return "has no do_train: it is for inference, evaluation or preparing data"
    return ""


def read(book: Notebook, files: Files) -> None:
    """Read LLaMA-Factory's keys."""
    if "model_name_or_path" not in book and "train_dataset" in book:
        _read_next(book, files)
        return
    book.answer("model", book.text("model_name_or_path"), "model_name_or_path")
    stage = book.word("stage", str(default_of("llama-factory", "stage") or "sft"))
    set_task(book, "stage", stage)
    if stage == "dpo" and book.word("pref_loss") in ("orpo", "simpo"):  # its `use_ref_model`, finetuning_args.py
        book.answer("task", "orpo", "stage", "pref_loss")
    elif stage in ("dpo", "kto"):
        # train/dpo/trainer.py makes all logits, as TRL did before 1.0
        book.answers.setdefault("loss", "plain")
    length = book.positive("cutoff_len", default_of("llama-factory", "cutoff_len"))
    book.answer("seq_len", length, "cutoff_len")
    _read_method(book)
    attention = book.word("flash_attn")
    read_attention(book, "flash_attn", "sdpa")
    if attention in ("auto", ""):
        book.answers["attention"] = "sdpa"
    if book.flag("enable_liger_kernel"):
        book.answer("loss", "fused", "enable_liger_kernel")
    recomputes = not book.flag("disable_gradient_checkpointing")
    pure = book.flag("pure_bf16")
    read_training(book, files, loading=Loading(in_16_bits=pure), recomputes=recomputes, trainer="llama-factory")
    book.become("checkpointing", book.answers["checkpointing"], "disable_gradient_checkpointing")
    if pure:
        is_replica = str(book.answers.get("strategy") or "ddp") in ("single", "ddp")
        book.answer("precision", "bf16-pure" if is_replica else "bf16", "pure_bf16")
    if book.flag("use_muon"):
        book.answer("optimizer", "muon", "use_muon")
    if book.flag("packing") or (stage == "pt" and "packing" not in book):
        book.become("packing", "samples are full", "packing")
    degree = book.positive("cp_size")
    if degree is not None and degree > 1:
        book.answer("cp", degree, "cp_size")
    if "deepspeed" not in book and "deepspeed_config" in book:
        read_deepspeed_of(book, "deepspeed_config", files)
    book.close(
        without_effect=lambda key: key in _PLAIN or without_effect(key),
        gaps=_GAPS,
        names=keys_of("llama-factory", "huggingface") | _PLAIN,
        refuses_unknown=True,
    )


def _read_next(book: Notebook, files: Files) -> None:
    """Read the keys of its next major version: `src/llamafactory/v1/config/`."""
    book.answer("model", book.text("model"), "model")
    book.answer("task", "causal-lm", "model_class")
    book.answer("seq_len", book.positive("cutoff_len", 2048), "cutoff_len")
    book.answer("micro_batch", book.positive("micro_batch_size", 1), "micro_batch_size")
    total = book.positive("global_batch_size")
    if total is not None:
        book.answer("global_batch", total, "global_batch_size")
    book.answer("precision", "bf16" if book.flag("bf16", True) else "fp32", "bf16")
    steps = book.positive("max_steps")
    if steps:
        book.steps = steps
        book.become("steps", steps, "max_steps")
    read_attention(book, "flash_attn")
    kind = book.word("peft_config.name", "full")
    if kind in ("lora", "qlora"):
        book.answer("method", "qlora" if any(book.under("quant_config")) else "lora", "peft_config.name")
        book.answer("lora_rank", book.positive("peft_config.r", 8), "peft_config.r")
        targets = lora_targets(book.raw("peft_config.target_modules", "all"))
        book.answer("lora_targets", targets, "peft_config.target_modules")
    elif kind != "full":
        book.leave("peft_config.name", f"{kind}: all weights are counted as trained", matters=True)
    name = book.word("dist_config.name")
    if name == "deepspeed":
        book.answer("strategy", "zero3", "dist_config.name")
        read_deepspeed_of(book, "dist_config.config_file", files)
    elif name:
        book.answer("strategy", "fsdp", "dist_config.name")
    if book.flag("use_muon") or book.word("optim_config.name") == "muon":
        book.answer("optimizer", "muon", "optim_config.name")
    degree = book.positive("cp_size", 1) or 1
    if degree > 1:
        book.answer("cp", degree, "cp_size")
    plain = _PLAIN | {
        "kernel_config",
        "optim_config",
        "dist_config",
        "init_config",
        "train_dataset",
        "quant_config",
        "cp_mode",
    }
    book.close(
        without_effect=lambda key: key.partition(".")[0] in plain or without_effect(key),
        gaps={
            **_GAPS,
            "batching_strategy": "samples are counted at their full length",
            "peft_config": "a part of an adapter",
        },
        names=(),
    )


def _read_method(book: Notebook) -> None:
    kind = book.word("finetuning_type", str(default_of("llama-factory", "finetuning_type")))
    if kind in ("full", "freeze"):
        book.answer("method", "full", "finetuning_type")
        if kind == "freeze":
            book.leave("finetuning_type", "freeze: all weights are counted as trained", matters=True)
        return
    if kind == "oft":
        book.leave("finetuning_type", "OFT is counted as LoRA", matters=True)
    book.answer("method", "dora" if book.flag("use_dora") else "lora", "finetuning_type", "use_dora")
    book.answer("lora_rank", book.positive("lora_rank", default_of("llama-factory", "lora_rank")), "lora_rank")
    targets = book.raw("lora_target", default_of("llama-factory", "lora_target"))
    book.answer("lora_targets", lora_targets(targets), "lora_target")
    bits = book.whole("quantization_bit")
    if bits is not None:
        read_quantisation(book, in_4_bits=bits == 4, in_8_bits=bits == 8, keys=("quantization_bit",))
        if bits not in (4, 8):
            book.leave("quantization_bit", f"weights in {bits} bits are counted in 16", matters=True)
