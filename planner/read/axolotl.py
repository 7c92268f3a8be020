"""axolotl's YAML.

Keys and defaults: axolotl-ai-cloud/axolotl@067b021c8 `src/axolotl/utils/schemas/`; weights are loaded and trained
in the precision's own type (`utils/config/__init__.py`, `resolve_dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import TWO_BATCHES, Notebook
from planner.read.huggingface import Loading, keep_in_16_bits, read_deepspeed_of, read_quantisation
from planner.read.sharding import read_fsdp
from planner.read.trainers import (
    default_of,
    keys_of,
    lora_targets,
    read_attention,
    read_optimizer,
    set_task,
    without_effect,
)

_GAPS: Mapping[str, str] = {
    "unfrozen_parameters": "all weights are counted as trained",
    "lora_modules_to_save": "what is trained whole beside the adapters is not counted",
    "lora_target_parameters": "adapters beside experts' own parameters are not counted",
    "activation_offloading": "activations in host memory are not counted",
    "relora": "ReLoRA's restarts are not counted",
    "lisa_n_layers": "LISA's few trained layers are not counted",
    "lisa_step_interval": "LISA's few trained layers are not counted",
    "quantize_moe_experts": "experts are counted in the weights' own type",
    "qat": "fake quantisation is not counted",
    "tensor_parallel_size": "axolotl's tensor parallelism is counted as dsplan's own",
    "expert_parallel_size": "axolotl's expert parallelism is not counted",
    "gptq": "GPTQ weights are counted in 16 bit",
    "fp8": "torchao's fp8 products are counted by tensor",
    "fp8_enable_fsdp_float8_all_gather": "weights are counted in 16 bit between ranks",
    "plugins": "kernels of plugins are counted where their own keys say so",
    "vllm": "generation is not counted",
    "trl": "generation is not counted",
    "reward_model": "a further model is not counted",
    "process_reward_model": "a further model is not counted",
    "max_packed_sequence_len": "a key of earlier releases; sequence_len counts",
    "lora_mlp_kernel": "axolotl's own LoRA kernels are counted as PEFT's",
    "lora_qkv_kernel": "axolotl's own LoRA kernels are counted as PEFT's",
    "lora_o_kernel": "axolotl's own LoRA kernels are counted as PEFT's",
    "use_kernels": "kernels of the Hub are not counted",
    "use_scattermoe": "ScatterMoE's kernels are counted as grouped products",
    "use_sonicmoe": "SonicMoE's kernels are counted as grouped products",
    "experts_implementation": "experts are counted as transformers' own",
    "ebft": "its update is counted as supervised training",
    "diffusion": "diffusion is not counted",
    "tiled_mlp": "the MLP is counted whole",
    "liger_rms_norm": "fused norms are counted as transformers' own",
    "liger_layer_norm": "fused norms are counted as transformers' own",
    "liger_rms_norm_gated": "fused norms are counted as transformers' own",
    "liger_glu_activation": "a fused activation is counted as transformers' own",
    "liger_rope": "fused rotary embeddings are counted as transformers' own",
    "llama4_linearized_experts": "experts are counted as transformers' own",
    "fused_attn_kernel": "attention's own kernels are counted as flash attention",
    "flash_attn_fuse_mlp": "fused MLPs are counted as transformers' own",
    "flash_attn_cross_entropy": "a fused cross-entropy is counted as torch's own",
    "flash_attn_rms_norm": "fused norms are counted as transformers' own",
    "freeze_mm_modules": "of models that see, the language model is counted",
    "low_cpu_mem_usage": "loading is counted as transformers does it",
    "load_in_8bit": "without an adapter it is as if it were not there",
    "load_in_4bit": "without an adapter it is as if it were not there",
    "model_config": "changes of the model's own config are not counted",
    "model_quantization_config": "the checkpoint's own quantisation is not counted",
    "model_quantization_config_kwargs": "the checkpoint's own quantisation is not counted",
    **dict.fromkeys(("use_dsv4_kernels", "use_glm_dsa_kernels"), "kernels of the Hub are not counted"),
    "cls_model_config": "changes of the model's own config are not counted",
    **dict.fromkeys(
        ("expert_parallel_num_nvl_bytes", "expert_parallel_token_capacity"),
        "axolotl's expert parallelism is not counted",
    ),
    "lisa_layers_attribute": "LISA's few trained layers are not counted",
    **dict.fromkeys(("relora_prune_ratio", "relora_cpu_offload"), "ReLoRA's restarts are not counted"),
    "do_causal_lm_eval": "generation of an evaluation is not counted",
    "ddp": "replicas are what several GPUs are counted as",
    "use_ray": "ranks are counted as torch's own launcher starts them",
    "bnb_config_kwargs": "bitsandbytes is counted with double quantisation",
}
_PLAIN = frozenset(
    {
        *("lora_model_dir", "strict", "processor_type", "type_of_model", "model_type", "is_llama_derived_model"),
        *("chat_template_jinja", "experimental_skip_move_to_device", "gptq_model_v1", "gptq_groupsize", "s2_attention"),
        *(
            "flash_optimum",
            "gptq_disable_exllama",
            "reinit_weights",
            "resize_token_embeddings_to_32x",
            "use_tensorboard",
        ),
        *("gradient_checkpointing_kwargs", "pad_to_sequence_len", "eval_sample_packing", "min_sample_len", "unsloth"),
        *(
            "eval_table_size",
            "eval_max_new_tokens",
            "eval_causal_lm_metrics",
            "save_total_limit",
            "curriculum_sampling",
        ),
        *("sample_packing_sequentially", "sample_packing_eff_est", "total_num_tokens", "num_labels", "is_preprocess"),
        *("rl_beta", "orpo_alpha", "kto_desirable_weight", "device_map", "accelerator_config", "dataset_processes"),
        *("tokens", "special_tokens", "flex_attn_compile_kwargs", "torch_compile_mode", "sdp_attention", "test_value"),
        *("eaft_alpha", "eaft_k", "use_eaft", "center_rewards_coefficient", "shuffle_merged_datasets", "gc_steps"),
        *(
            "streaming_multipack_buffer_size",
            "pretrain_multipack_attn",
            "llmcompressor",
            "datasets",
            "rl",
            "batch_size",
        ),
        *("pretraining_dataset", "test_datasets", "max_steps", "eval_batch_size", "lora_alpha", "peft", "eot_tokens"),
        *("use_onebitllms", "nvfp4_merge_aware", "dsv4_fp4_grouped_mode", "gemma4_hybrid_attn_impl", "swanlab"),
    }
)


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of axolotl's YAML."""
    own = {
        "datasets",
        "sequence_len",
        "micro_batch_size",
        "adapter",
        "sample_packing",
        "pretraining_dataset",
        "val_set_size",
    }
    return "base_model" in keys and any(key.partition(".")[0] in own for key in keys)


def read(book: Notebook, files: Files) -> None:
    """Read axolotl's YAML."""
    book.answer("model", book.text("base_model"), "base_model")
    book.answer("task", "causal-lm")
    if "rl" in book:
        set_task(book, "rl", book.word("rl"))
    elif book.flag("reward_model"):
        book.answer("task", "reward", "reward_model")
    book.answer("seq_len", book.positive("sequence_len", default_of("axolotl", "sequence_len")), "sequence_len")
    micro = book.positive("micro_batch_size", default_of("axolotl", "micro_batch_size"))
    book.answer("micro_batch", micro, "micro_batch_size")
    accumulation = book.positive("gradient_accumulation_steps")
    total = book.positive("batch_size")
    if accumulation is None and total is not None and micro:
        accumulation = max(total // micro, 1)  # utils/config/__init__.py, normalize_config
        book.become("grad_accum", accumulation, "batch_size")
    book.answer("grad_accum", accumulation or 1, "gradient_accumulation_steps")
    if total is not None and "gradient_accumulation_steps" in book:  # utils/schemas/validation.py, check_gas_bsz
        message = "batch_size beside gradient_accumulation_steps, with which axolotl stops; leave batch_size out"
        book.find("error", TWO_BATCHES, message, "batch_size")
    read_optimizer(book, "optimizer", "adamw-fused")
    _read_adapter(book)
    _read_precision(book)
    _read_kernels(book)
    _read_recomputation(book)
    _read_sharding(book, files)
    keep_in_16_bits(book, Loading(in_16_bits=True))
    _read_run(book)
    book.close(
        without_effect=lambda key: key in _PLAIN or without_effect(key),
        gaps=_GAPS,
        names=keys_of("axolotl", "huggingface") | _PLAIN,
    )


def _read_adapter(book: Notebook) -> None:
    adapter = book.word("adapter")
    if not adapter:
        for key in tuple(book.settings):
            if key.startswith(("lora_", "peft")):
                book.leave(key, "there is no adapter", matters=False)
        return
    method: words.Method = "qlora" if adapter == "qlora" else "lora"
    if adapter not in ("lora", "qlora"):
        book.leave("adapter", f"adapter {adapter} is counted as lora", matters=True)
    if book.flag("peft_use_dora"):
        method = "dora"
    in_4, in_8 = book.flag("load_in_4bit"), book.flag("load_in_8bit")
    if adapter == "qlora" and not in_4:
        # schemas/validation.py: "Require cfg.load_in_4bit to be True for qlora"
        book.find(
            "error", "contradiction", "adapter: qlora needs load_in_4bit: true, without which axolotl stops", "adapter"
        )
    book.answer("method", method, "adapter")
    read_quantisation(book, in_4_bits=in_4 or adapter == "qlora", in_8_bits=in_8, keys=("load_in_4bit", "load_in_8bit"))
    rank = book.positive("lora_r")
    if rank is not None:
        book.answer("lora_rank", rank, "lora_r")
    if book.flag("lora_target_linear"):
        book.answer("lora_targets", "all-linear", "lora_target_linear")
        if "lora_target_modules" in book:
            book.leave("lora_target_modules", "lora_target_linear counts all linear layers already", matters=False)
    elif "lora_target_modules" in book:
        book.answer("lora_targets", lora_targets(book.raw("lora_target_modules")), "lora_target_modules")
    else:
        book.answer("lora_targets", "all-linear")


def _read_precision(book: Notebook) -> None:
    precision: words.Precision = "fp32"
    bf16 = book.word("bf16") or ("true" if book.flag("bfloat16") else str(default_of("axolotl", "bf16")))
    if bf16 in ("auto", "true", "full", "yes", "1"):
        precision = "bf16"
    elif book.flag("fp16") or book.flag("float16"):
        precision = "fp16"
    book.answer("precision", precision, "bf16", "bfloat16", "fp16", "float16")
    if bf16 == "auto":
        book.assume("bf16: auto is bf16 on a card that has it", "bf16")


def _read_kernels(book: Notebook) -> None:
    attention = read_attention(book, "attn_implementation")
    for key, value in (("flash_attention", "flash"), ("sdp_attention", "sdpa"), ("eager_attention", "eager")):
        if book.flag(key):
            book.answer("attention", value, key)
            attention = value  # type: ignore[assignment]
            book.find("info", "deprecated-key", f"{key} is deprecated; write attn_implementation", key)
    if book.flag("sample_packing"):
        book.become("packing", "samples are full", "sample_packing")
        if attention == "eager":
            message = "sample_packing with eager attention lets samples see each other; use flash_attention_2"
            book.find("warning", "packing", message, "sample_packing")
    elif "sample_packing" in book:
        book.become("packing", "samples are counted at sequence_len", "sample_packing")
    plugins = book.text("plugins", "") or ""
    for key in ("liger_fused_linear_cross_entropy", "cut_cross_entropy"):
        if book.flag(key):
            book.answer("loss", "fused", key)
    if "cut_cross_entropy" in plugins and book.flag("cut_cross_entropy", True):
        book.answer("loss", "fused", "plugins")
    if book.flag("chunked_cross_entropy"):
        book.answer("loss", "chunked", "chunked_cross_entropy")
    if "plugins" in book and "plugins" not in {item.key for item in book.understood}:
        ours = ("liger", "cut_cross_entropy")
        other = [name for name in plugins.split(",") if not any(word in name for word in ours)]
        if other:
            book.leave("plugins", f"what {other[0].strip()} changes is counted where its keys say so", matters=True)
        else:
            book.become("loss", book.answers.get("loss", "plain"), "plugins")
    if book.flag("torch_compile") or book.word("torch_compile") == "auto":
        book.answer("compile", True, "torch_compile")


def _read_recomputation(book: Notebook) -> None:
    key = "gradient_checkpointing"
    word = book.word(key)
    if word in ("offload", "offload_disk", "unsloth"):
        book.answer("checkpointing", "full", key)
        book.answer("activations_on_host", word != "offload_disk", key)
    else:
        book.answer("checkpointing", "full" if key in book and book.flag(key) else "none", key)


def _read_sharding(book: Notebook, files: Files) -> None:
    if any(book.under("fsdp_config")) or "fsdp" in book:
        if "deepspeed" in book:
            # schemas/validation.py: "deepspeed and fsdp cannot be used together"
            book.find(
                "error", "contradiction", "deepspeed and fsdp are both there, with which axolotl stops", "deepspeed"
            )
        read_fsdp(book, "fsdp_config", "fsdp")
        version = book.whole("fsdp_version") or book.whole("fsdp_config.fsdp_version")
        if version != 2:
            book.find("info", "deprecated-key", "FSDP1 is deprecated in axolotl; set fsdp_version: 2", "fsdp")
    if "deepspeed" in book:
        read_deepspeed_of(book, "deepspeed", files)
    for key, field in (
        ("context_parallel_size", "cp"),
        ("tensor_parallel_size", "tp"),
        ("sequence_parallel_degree", "cp"),
    ):
        degree = book.positive(key)
        if degree is not None and degree > 1:
            book.answer(field, degree, key)
    replicate, shard = book.positive("dp_replicate_size", 1) or 1, book.positive("dp_shard_size", 1) or 1
    if shard > 1:
        book.answer("strategy", "hsdp" if replicate > 1 else "fsdp", "dp_shard_size", "dp_replicate_size")
        if replicate > 1:
            book.answer("copies", replicate, "dp_replicate_size")
        sharing = book.answers.get("tp", 1) * book.answers.get("cp", 1)
        book.answer("gpus", replicate * shard * sharing, "dp_shard_size", "dp_replicate_size")


def _read_run(book: Notebook) -> None:
    steps = book.whole("max_steps")
    if steps is not None and steps > 0:
        book.steps = steps
        book.become("steps", steps, "max_steps")
    evaluates = (book.number("val_set_size", 0) or 0) > 0 or any(book.under("test_datasets"))
    batch = book.positive("eval_batch_size", book.answers.get("micro_batch"))
    if evaluates:
        book.answer("eval_batch", batch, "eval_batch_size", "val_set_size")
