"""ms-swift's scripts and YAML: modelscope/ms-swift@3602360a5 `swift/arguments/`.

The model is loaded in the checkpoint's own type and trained so (`base_args/model_args.py`, `_init_torch_dtype`);
`megatron sft` and its like are in `planner.read.megatron`.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook
from planner.read.huggingface import GAPS, Loading, read_quantisation, read_training
from planner.read.rounds import counts_rounds, read_rounds
from planner.read.trainers import (
    default_of,
    keys_of,
    lora_targets,
    read_attention,
    set_task,
    without_effect,
)

TRAINING_COMMANDS = ("sft", "pt", "rlhf")
_OF_VISION = ("freeze_vit", "freeze_aligner", "freeze_llm", "vit_gradient_checkpointing", "vit_lr", "aligner_lr")
_OF_GENERATION = (
    *("vllm_gpu_memory_utilization", "vllm_max_model_len", "vllm_tensor_parallel_size", "vllm_server_host"),
    *("sleep_level", "offload_optimizer", "offload_model", "move_model_batches", "steps_per_generation", "vllm_mode"),
    *("num_iterations", "generation_batch_size", "multi_turn_scheduler", "max_turns", "dynamic_sample", "use_vllm"),
    *("num_generations", "max_completion_length", "reward_model", "reward_funcs", "vllm_server_port", "lmbda"),
)
_GAPS: Mapping[str, str] = {
    **GAPS,
    **dict.fromkeys(_OF_VISION, "of models that see, the language model is counted"),
    **dict.fromkeys(_OF_GENERATION, "generation is not counted"),
    "teacher_model": "a further model is not counted",
    "ref_model": "the frozen copy is counted as of the same model",
    "router_aux_loss_coef": "the router's loss is not counted",
    "use_galore": "GaLore's states of a smaller rank are not counted",
    "deepspeed_autotp_size": "DeepSpeed's AutoTP is not counted",
    "zero_hpz_partition_size": "ZeRO++'s second copy of the weights is not counted",
    "lisa_activated_layers": "LISA's few trained layers are not counted",
    "freeze_parameters": "all weights are counted as trained",
    "freeze_parameters_ratio": "all weights are counted as trained",
    "trainable_parameters": "what is trained beside the adapters is not counted",
    "sequence_parallel_size": "Ulysses is counted as context parallelism",
    "device_map": "layers on several GPUs of one process are not counted",
    "MAX_PIXELS": "images are not counted",
    "max_pixels": "images are not counted",
    "experts_impl": "experts are counted as transformers' own",
    "use_logits_to_keep": "logits are counted for every token",
    "padding_free": "samples are counted at their full length",
    **dict.fromkeys(("teacher_deepspeed", "teacher_model_server", "gkd_logits_topk"), "a further model is not counted"),
    **dict.fromkeys(("orm_model", "prm_model", "reward_model_plugin"), "a further model is not counted"),
    **dict.fromkeys(
        (
            "use_gym_env",
            "async_generate",
            "vllm_enable_lora",
            "sampler_engine",
            "num_return_sequences",
            "max_model_len",
        ),
        "generation is not counted",
    ),
    "response_length": "generation is not counted",
    "chord_sft_per_device_train_batch_size": "a second, supervised batch is not counted",
    "llamapro_num_new_blocks": "new blocks are not counted",
    "reft_intervention_type": "interventions are not counted",
    "galore_quantization": "GaLore's states of a smaller rank are not counted",
    "optimizer": "an optimizer of its own is not counted",
    "tuner_backend": "adapters are counted as PEFT's",
}
_PLAIN = frozenset(
    {
        *(
            "dataset",
            "val_dataset",
            "cached_dataset",
            "cached_val_dataset",
            "system",
            "model_author",
            "model_name",
            "loss_scale",
        ),
        *(
            "external_plugins",
            "stream",
            "agent_template",
            "use_chat_template",
            "model_type",
            "truncation_strategy",
            "use_hf",
            "packing",
        ),
        *(
            "use_ray",
            "columns",
            "bnb_4bit_quant_type",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_use_double_quant",
            "bnb_4bit_quant_storage",
            "sft_alpha",
            "top_entropy_quantile",
            "enable_dft_loss",
            "loss_weights",
            "tau_pos",
            "tau_neg",
        ),
        *(
            "vllm_enforce_eager",
            "eval_use_evalscope",
            "eval_limit",
            "early_stop_interval",
            "rope_scaling",
            "lora_ga_batch_size",
            "lora_ga_iters",
            "lora_ga_max_length",
            "lora_ga_direction",
            "lora_ga_scale",
            "lora_ga_stable_gamma",
            "galore_optim_per_parameter",
        ),
        *(
            "custom_register_path",
            "custom_dataset_info",
            "custom_model_info",
            "rpo_alpha",
            "beta",
            "epsilon",
            "epsilon_high",
        ),
        *(
            "log_completions",
            "overlong_filter",
            "soft_max_length",
            "soft_cache_length",
            "reward_weights",
            "max_resample_times",
        ),
        *(
            "importance_sampling_level",
            "scale_rewards",
            "advantage_estimator",
            "num_labels",
            "problem_type",
            "create_checkpoint_symlink",
        ),
        *(
            "add_version",
            "check_model",
            "load_data_args",
            "local_repo_path",
            "norm_bbox",
            "strict",
            "lazy_tokenize",
            "max_grad_norm",
        ),
        *(
            "use_rslora",
            "init_weights",
            "modules_to_save_",
            "kl_in_reward",
            "delta",
            "tau",
            "sapo_tau",
            "padding_side",
            "enable_thinking",
        ),
        *(
            "add_non_thinking_prefix",
            "response_prefix",
            "undesirable_weight",
            "desirable_weight",
            "dataloader_drop_last",
            "cosine_min_len_value_wrong",
            "config",
        ),
        *(
            "adapters",
            "merge_lora",
            "save_safetensors",
            "ddp_backend",
            "ignore_args_error",
            "use_flash_ckpt",
            "new_special_tokens",
        ),
    }
)
_NO_TRAINING = {
    "infer": "inference",
    "deploy": "serving",
    "export": "exporting",
    "eval": "evaluation",
    "app": "a page",
    "web-ui": "a page",
    "sample": "sampling",
    "rollout": "generation for others",
    "merge-lora": "merging adapters",
}


def why_no_training(command: str) -> str:
    """Return what a subcommand is for where that is no training; empty where it is."""
    purpose = _NO_TRAINING.get(command, "" if command in TRAINING_COMMANDS else "something else")
    return f"`swift {command}` is for {purpose} and trains nothing" if purpose else ""


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of ms-swift's YAML."""
    if {"tensor_model_parallel_size", "micro_batch_size", "expert_model_parallel_size"} & keys:
        return False
    own = {"tuner_type", "train_type", "rlhf_type", "torch_dtype", "max_length", "dataset", "load_from_cache_file"}
    return "model" in keys and len(own & keys) > 1


def read(book: Notebook, files: Files, command: str) -> None:
    """Read ms-swift's flags; `command` is its subcommand."""
    book.answer("model", book.text("model") or book.text("model_id_or_path"), "model", "model_id_or_path")
    if "model_id_or_path" in book:
        book.find(
            "error", "renamed-key", "ms-swift 3 and later has no model_id_or_path; write model", "model_id_or_path"
        )
    _read_task(book, command)
    length = book.positive("max_length")
    if length is None:
        book.assume("max_length is not there: ms-swift takes the model's own, which counts here too")
    else:
        book.answer("seq_len", length, "max_length")
    _read_method(book)
    read_attention(book, "attn_impl")
    dtype = book.word("torch_dtype")
    # base_args/model_args.py, _init_torch_dtype: fp16 for weights in fp32 and fp16, bf16 for those in bf16
    precision: words.Precision = "fp16" if dtype in ("float16", "float32") else "bf16"
    book.become("load_dtype", dtype, "torch_dtype")
    if not dtype:
        book.assume("torch_dtype is the checkpoint's own, counted as bf16")
    loading = Loading(in_16_bits=dtype in ("", "bfloat16", "float16"))
    recomputes = bool(default_of("ms-swift", "gradient_checkpointing"))
    read_training(book, files, loading=loading, recomputes=recomputes, trainer="ms-swift", precision=precision)
    if book.flag("packing"):
        book.become("packing", "samples are full", "packing")
    degree = book.positive("sequence_parallel_size")
    if degree is not None and degree > 1:
        book.answer("cp", degree, "sequence_parallel_size")
    kind = book.word("rlhf_type")
    if counts_rounds(kind):
        read_rounds(book, "ms-swift", "rlhf_type", kind)
    book.close(
        without_effect=lambda key: key in _PLAIN or without_effect(key),
        gaps=_GAPS,
        names=keys_of("ms-swift", "huggingface") | _PLAIN,
        refuses_unknown=True,
    )


def _read_task(book: Notebook, command: str) -> None:
    kind = book.word("task_type")
    if command == "rlhf" or "rlhf_type" in book:
        kind = book.word("rlhf_type", "dpo")
        if not counts_rounds(kind):
            set_task(book, "rlhf_type", kind)
        if book.answers.get("task") in words.REFERRING:
            # requirements/framework.txt: TRL below 1.0, which has no tiles
            book.answers.setdefault("loss", "plain")
    elif kind in ("seq_cls", "reranker", "generative_reranker", "embedding"):
        set_task(book, "task_type", kind)
    else:
        book.answer("task", "causal-lm", "task_type")


def _read_method(book: Notebook) -> None:
    key = next((key for key in ("tuner_type", "train_type", "sft_type") if key in book), "tuner_type")
    if key in ("sft_type", "train_type") and key in book:
        book.find("warning", "renamed-key", f"{key} is an older name; write tuner_type", key)
    kind = book.word(key, str(default_of("ms-swift", "tuner_type")))
    if kind == "full":
        book.answer("method", "full", key)
        return
    if kind not in ("lora", "dora", "adalora"):
        book.leave(key, f"{kind} is counted as lora", matters=True)
    book.answer("method", "dora" if book.flag("use_dora") else "lora", key, "use_dora")
    book.answer("lora_rank", book.positive("lora_rank", default_of("ms-swift", "lora_rank")), "lora_rank")
    if "target_regex" in book:
        book.answer("lora_targets", book.text("target_regex"), "target_regex")
        book.leave("target_modules", "target_regex overrides it", matters=False)
    else:
        book.answer("lora_targets", lora_targets(book.raw("target_modules", "all-linear")), "target_modules")
    bits, quantiser = book.whole("quant_bits"), book.word("quant_method", "bnb")
    if bits is not None:
        if quantiser == "bnb":
            keys = ("quant_bits", "quant_method")
            read_quantisation(book, in_4_bits=bits == 4, in_8_bits=bits == 8, keys=keys)
        else:
            book.leave("quant_method", f"weights in {quantiser}'s {bits} bits are counted in 16", matters=True)
