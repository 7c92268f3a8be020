"""HF's `TrainingArguments`, as JSON, YAML or flags, and what inherits them: TRL's CLI and scripts like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.read.documents import Files, parse_json_settings
from planner.read.form import COMMAND, TWO_PRECISIONS, Notebook
from planner.read.rounds import counts_rounds, read_rounds
from planner.read.sharding import (
    KEPT_IN_16_BITS,
    close_deepspeed,
    merge_deepspeed,
    read_deepspeed,
    read_fsdp,
    stage_of_name,
)
from planner.read.trainers import (
    default_of,
    keys_of,
    lora_targets,
    read_attention,
    read_optimizer,
    set_task,
    without_effect,
)

GAPS: Mapping[str, str] = {
    "auto_find_batch_size": "the micro-batch may be halved when memory runs out",
    "optim_target_modules": "GaLore and its like keep states of a smaller rank, which is not counted",
    "torch_empty_cache_steps": "the cache is counted as never emptied",
    "neat_packing": "packed samples are counted as one sequence",
    "padding_free": "samples are counted at their full length",
    "freeze_vit": "of models that see, the language model is counted",
    "average_tokens_across_devices": "one reduction more each step is not counted",
    "use_galore": "GaLore's states of a smaller rank are not counted",
    "use_apollo": "APOLLO's states of a smaller rank are not counted",
    "use_badam": "BAdam's block by block training is not counted",
    "parallelism_config": "its degrees are read in accelerate's own config only",
    "use_vllm": "generation is not counted",
    "vllm_mode": "generation is not counted",
    "num_generations": "generation is not counted",
    "max_completion_length": "generation is not counted",
    "assistant_only_loss": "the loss is counted over all tokens",
    "tp_size": "Trainer's tensor parallelism is not counted",
    "use_peft": "adapters are counted as the other keys say",
    "activation_offloading": "activations in host memory are not counted",
    "modules_to_save": "what is trained whole beside the adapters is not counted",
    "lora_modules_to_save": "what is trained whole beside the adapters is not counted",
    "loss_type": "the loss is counted as cross-entropy",
    "ref_model": "the frozen copy is counted as of the same model",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """In what a trainer holds the weights that it trains, where neither DeepSpeed nor FSDP decides it."""

    in_16_bits: bool = False
    """True where the model is loaded in the checkpoint's 16 bits and trained so; else weights are fp32."""


def read_training(
    book: Notebook,
    files: Files,
    *,
    loading: Loading,
    recomputes: bool,
    trainer: str,
    precision: words.Precision = "fp32",
) -> None:
    """Read the fields of `TrainingArguments`: batch, precision, optimizer, recomputation, DeepSpeed and FSDP.

    Defaults are those of transformers where `trainer` has none of its own; `recomputes` and `precision`
    are the trainer's.
    """
    micro = default_of(trainer, "per_device_train_batch_size") or default_of(
        "huggingface", "per_device_train_batch_size"
    )
    book.answer("micro_batch", book.positive("per_device_train_batch_size", micro), "per_device_train_batch_size")
    book.answer("grad_accum", book.positive("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
    read_optimizer(book, "optim", "adamw-fused")
    checkpoints = recomputes
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if key in book:
            checkpoints = book.flag(key)
            book.become("checkpointing", "full" if checkpoints else "none", key)
    book.answers["checkpointing"] = "full" if checkpoints else "none"
    if book.flag("torch_compile"):
        book.answer("compile", True, "torch_compile")
    if book.flag("use_liger_kernel") or book.flag("use_liger"):
        book.answer("loss", "fused", "use_liger_kernel", "use_liger")
    _read_precision(book, precision)
    _read_evaluation(book)
    steps = book.whole("max_steps")
    if steps is not None and steps > 0:
        book.steps = steps
        book.become("steps", steps, "max_steps")
    if "fsdp" in book and book.word("fsdp") not in ("false", ""):
        read_fsdp(book, "fsdp_config", "fsdp")
    elif any(book.under("fsdp")):  # of ms-swift: the content of a file such as its `swift/config/fsdp2.json`
        read_fsdp(book, "fsdp.fsdp_config", "fsdp.fsdp")
    for key in ("deepspeed", "deepspeed_config"):
        if key in book:
            read_deepspeed_of(book, key, files)
        elif inner := tuple(book.under(key)):
            _read_nested_deepspeed(book, key, inner)
    keep_in_16_bits(book, loading)


def _read_precision(book: Notebook, default: words.Precision) -> None:
    precision: words.Precision = "fp32" if "bf16" in book or "fp16" in book else default
    if book.flag("fp16"):
        precision = "fp16"
    if book.word("bf16") == "auto" or book.flag("bf16"):
        if precision == "fp16" and book.word("bf16") != "auto":  # transformers 5.23, TrainingArguments.__post_init__
            message = "bf16 and fp16 are both on, which transformers refuses; keep one"
            book.find("error", TWO_PRECISIONS, message, "fp16")
        precision = "bf16"
    book.answer("precision", precision, "bf16", "fp16")


def _read_evaluation(book: Notebook) -> None:
    strategy = next((book.word(key) for key in ("eval_strategy", "evaluation_strategy") if key in book), "no")
    batch = book.positive("per_device_eval_batch_size")
    evaluates = strategy not in ("no", "") or "eval_steps" in book
    if "evaluation_strategy" in book:
        message = "evaluation_strategy is gone from transformers 5; write eval_strategy"
        book.find("warning", "deprecated-key", message, "evaluation_strategy")
    if evaluates and batch is not None:
        book.answer("eval_batch", batch, "per_device_eval_batch_size")
    elif batch is not None:
        book.leave("per_device_eval_batch_size", "nothing is evaluated while it trains", matters=False)


def keep_in_16_bits(book: Notebook, loading: Loading) -> None:
    """Decide what a 16-bit precision means for weights that replicas train as they were loaded."""
    strategy = str(book.answers.get("strategy") or "ddp")
    is_replica = strategy in ("single", "ddp")
    trains_all = book.answers.get("method", "full") == "full"
    if loading.in_16_bits and is_replica and trains_all and book.answers.get("precision") == "bf16":
        book.answers["precision"] = "bf16-pure"
        book.assume(KEPT_IN_16_BITS)


def read_deepspeed_of(book: Notebook, key: str, files: Files) -> None:
    """Read the DeepSpeed config that a key names: a file, JSON text, or a name that says its stage."""
    setting = book.settings.get(key)
    if setting is not None and setting.value is True:
        _read_switch(book, key)
        return
    if setting is None or setting.value is None or not str(setting.value).strip():
        return
    text = str(setting.value).strip()
    if text not in files.written and book.raw(key) is None:
        return
    if text.startswith("{"):
        source = replace(setting.source, path=f"{setting.source.path} ({key})", text=text, is_file=False)
        reason = ""
    else:
        found_source, reason = files.find(text, setting.source)
        if found_source is None:
            _take_stage(book, key, text, reason)
            return
        source = found_source
    _merge_read(book, Notebook(parse_json_settings(source), "DeepSpeed"), key)


def _read_switch(book: Notebook, key: str) -> None:
    """Read `--deepspeed` without a value, with which scripts of their own switch DeepSpeed on."""
    if "zero_stage" in book or "deepspeed_config" in book:
        book.become("backend", "deepspeed", key)
    else:
        book.leave(key, "the script writes its DeepSpeed config itself, and it is not counted", matters=True)


def _read_nested_deepspeed(book: Notebook, key: str, inner: tuple[str, ...]) -> None:
    """Read a DeepSpeed config that stands in the trainer's own as a mapping."""
    settings = [book.settings.pop(name) for name in inner]
    named = [replace(setting, key=setting.key.removeprefix(f"{key}.")) for setting in settings]
    _merge_read(book, Notebook(named, "DeepSpeed"), key)


def _merge_read(book: Notebook, config: Notebook, key: str) -> None:
    read_deepspeed(config)
    close_deepspeed(config)
    merge_deepspeed(book, config, key)
    book.understood += config.understood
    book.unread += config.unread
    book.findings += config.findings


def _take_stage(book: Notebook, key: str, name: str, reason: str) -> None:
    """Take stage and offload from the name of a DeepSpeed config that is not there."""
    by_name = stage_of_name(name)
    if by_name is None:
        book.answers.setdefault("strategy", "zero2")
        book.answers["backend"] = "deepspeed"
        book.leave(key, f"{name} {reason}; counted as stage 2", matters=True)
        return
    strategy, offload = by_name
    book.answers.update(backend="torch" if strategy == "ddp" else "deepspeed", offload=offload)
    book.answer("strategy", strategy, key)
    if "/" in name or name.endswith(".json"):
        message = f"{name} {reason}; its name says {strategy}" + (
            f" with offload {offload}" if offload != "none" else ""
        )
        book.assume(message, key)


def read_quantisation(book: Notebook, *, in_4_bits: bool, in_8_bits: bool, keys: tuple[str, ...]) -> None:
    """Fill in the method of adapters beside quantised weights."""
    if in_4_bits:
        if book.answers.get("method", "lora") in ("lora", "qlora"):
            book.answer("method", "qlora", *keys)
        book.answer("load_dtype", "nf4", *keys)
    elif in_8_bits:
        book.answer("load_dtype", "int8", *keys)


# TRL's CLI, and scripts that take ModelConfig and TrainingArguments as flags.

_LENGTH_KEYS = (
    "max_length",
    "max_seq_length",
    "max_seq_len",
    "block_size",
    "cutoff_len",
    "model_max_length",
    "seq_length",
)


def read_trl(book: Notebook, files: Files, command: str) -> None:
    """Read TRL's keys; `command` is its subcommand or script (`sft`, `dpo.py`).

    TRL 1.16 (`trl/trainer/base_config.py`, `trl/trainer/model_config.py`): bf16 and recomputation are on, and weights
    are loaded in float32 where `dtype` names nothing else (`create_model_from_path` has the same default).
    """
    method = next(
        (word for word in ("sft", "dpo", "grpo", "kto", "rloo", "reward", "orpo", "ppo", "cpo") if word in command), ""
    )
    book.answer("task", "causal-lm")
    if method not in ("", "sft") and not counts_rounds(method):
        set_task(book, COMMAND, method)
    _read_model(book)
    length = book.positive("max_length") or book.positive("max_seq_length")
    book.answer("seq_len", length or 1024, "max_length", "max_seq_length")
    if "max_seq_length" in book:
        book.find("error", "renamed-key", "TRL 1.x has no max_seq_length; write max_length", "max_seq_length")
    _read_adapters(book)
    is_fp16 = book.flag("fp16")
    if "bf16" not in book and not is_fp16:
        book.assume("bf16 is on, as TRL has it by default")
    dtype = book.word("dtype") or book.word("torch_dtype") or str(default_of("trl", "dtype"))
    book.become("load_dtype", dtype, "dtype", "torch_dtype")
    loading = Loading(in_16_bits=dtype in ("auto", "bfloat16", "bf16", "float16"))
    read_training(book, files, loading=loading, recomputes=True, trainer="trl", precision="bf16")
    if dtype == "float32" and book.answers.get("method", "full") != "full" and "load_dtype" not in book.answers:
        book.answers["load_dtype"] = "fp32"
        book.assume("frozen weights are loaded in fp32, as TRL does unless dtype says bfloat16, which halves them")
    if counts_rounds(method):
        read_rounds(book, "trl", COMMAND, method)
    _read_packing(book)
    book.close(
        without_effect=lambda key: key in ("config", "accelerate_config") or without_effect(key),
        gaps=GAPS,
        names=keys_of("trl", "huggingface") | {"config", "accelerate_config", *_LENGTH_KEYS},
        refuses_unknown=True,
    )


def _read_model(book: Notebook) -> None:
    for key in (
        "model_name_or_path",
        "model_name",
        "model",
        "model_id",
        "config_name",
        "pretrained_model_name_or_path",
        "bert_model",
    ):
        if key in book and (name := book.text(key)):
            book.answer("model", name, key)
            break
    read_attention(book, "attn_implementation")


def _read_adapters(book: Notebook) -> None:
    adapts = book.flag("use_peft") or book.flag("use_lora")
    if adapts:
        book.answer("method", "dora" if book.flag("use_dora") else "lora", "use_peft", "use_lora", "use_dora")
        rank = book.positive("lora_r") or book.positive("lora_rank")
        book.answer("lora_rank", rank or default_of("trl", "lora_r"), "lora_r", "lora_rank")
        if "lora_target_modules" in book:
            book.answer("lora_targets", lora_targets(book.raw("lora_target_modules")), "lora_target_modules")
    in_4, in_8 = book.flag("load_in_4bit"), book.flag("load_in_8bit")
    if adapts:
        read_quantisation(book, in_4_bits=in_4, in_8_bits=in_8, keys=("load_in_4bit", "load_in_8bit"))


def _read_packing(book: Notebook) -> None:
    if book.flag("packing"):
        book.become("packing", "samples are full", "packing")


def _read_stage(book: Notebook) -> None:
    """Read the flags of scripts that write their DeepSpeed config themselves, as DeepSpeed-Chat's do."""
    stage = book.whole("zero_stage")
    if stage is None:
        return
    strategy: words.Strategy = ("ddp", "zero1", "zero2", "zero3")[min(max(stage, 0), 3)]
    offload: words.Offload = "none"
    if book.flag("offload") and stage:
        offload = "all" if stage == 3 else "optimizer"
    book.answer("strategy", strategy, "zero_stage")
    book.answer("offload", offload, "offload")
    book.answers["backend"] = "deepspeed" if stage else "torch"


_CHAT_CRITIC = "the critic is counted as a copy of the actor; reward model, and the reference beside adapters, are not"


def _read_chat_rounds(book: Notebook) -> None:
    """Read the rounds of DeepSpeed-Chat's third step, whose actor generates itself; its flags lose their `actor_`.

    microsoft/DeepSpeedExamples@83757d9c `applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/main.py`.
    """
    given, actor = tuple(book.settings.values()), "actor_"
    for setting in given:
        name = setting.key.removeprefix(actor)
        if setting.key == "per_device_training_batch_size":
            name = "per_device_train_batch_size"
        if name != setting.key:
            del book.settings[setting.key]
            book.add(replace(setting, key=name))
    book.answer("task", "ppo", "model_name_or_path")
    lengths = ("max_prompt_seq_len", "max_answer_seq_len")
    prompt, completion = (book.positive(key, 256) or 256 for key in lengths)
    book.answer("prompt_len", prompt, lengths[0])
    book.answer("completion_len", str(completion), lengths[1])
    book.answer("seq_len", prompt + completion)
    book.answer("generations", 1)
    book.answer("num_iterations", book.positive("ppo_epochs", 1), "ppo_epochs")
    book.answer("rollout", "hf", "enable_hybrid_engine")
    book.answer("beta", 0.1)  # dschat/rlhf/ppo_trainer.py, kl_ctl
    book.leave("critic_model_name_or_path", _CHAT_CRITIC, matters=True)
    book.assume("completions are counted at their longest", lengths[1])


_OF_EXAMPLES: Mapping[str, str] = {
    "cf": "the script's own config of its model is not read",
    "deepspeed_transformer_kernel": "DeepSpeed's fused blocks are counted as transformers' own",
    "deepspeed_sparse_attention": "sparse attention is counted as full",
    "attention_dropout_checkpoint": "recomputed dropout is not counted",
    "progressive_layer_drop": "layers that are dropped are counted",
    "random_ltd": "tokens that layers skip are counted",
    "distill_method": "a further model is not counted",
    "pretrained_dir_student": "a further model is not counted",
    "max_num_image_per_sample": "images are not counted",
    "enable_mmca_attention": "attention of images is not counted",
    "ds_inference": "generation is not counted",
    **dict.fromkeys(
        ("train_batch_size", "batch_size", "batchsize"), "the script's own batch is counted as HF Trainer's default"
    ),
    **dict.fromkeys(("multiprocessing_distributed", "seq_len", "num_expand"), "the script's own model is not read"),
    **dict.fromkeys(("a", "arch", "batch_norm", "img_size", "model_type"), "the script's own model is not read"),
}
"""Gaps of DeepSpeedExamples' own scripts."""
_CHAT_GAPS: Mapping[str, str] = {
    **dict.fromkeys(("critic_zero_stage", "critic_gradient_checkpointing", "critic_lora_dim"), _CHAT_CRITIC),
    "critic_model_name_or_path": _CHAT_CRITIC,
    "offload_reference_model": "the frozen copy is counted as the actor is spread",
    "offload_reward_model": "a further model is not counted",
    "enable_ema": "a further copy of the weights is not counted",
    "inference_tp_size": "generation is counted on each GPU alone",
    "enable_mixed_precision_lora": "frozen weights are counted in 16 bits",
    "per_device_generation_batch_size": "a round is counted as one step's samples",
    "generation_batches": "a round is counted as one step's samples",
}
_OF_SCRIPTS = frozenset(
    {
        *("deepspeed_mpi", "task_name", "num_padding_at_beginning", "do_lower_case", "lora_module_name", "dropout"),
        *("critic_learning_rate", "critic_weight_decay", "critic_lora_module_name", "critic_lora_learning_rate"),
        *("lora_learning_rate", "data_split", "print_answers", "enable_test_mode", "test_stop_step"),
        *("tp_gather_partition_size", "max_prompt_seq_len", "release_inference_cache", "unpin_actor_parameters"),
        *("compute_fp32_loss", "align_overflow", "predict_batch_size", "doc_stride", "ckpt_type", "ckpt_to_save"),
        *(
            "load_training_checkpoint",
            "load_checkpoint_id",
            "save_best_model",
            "clean_best_model",
            "eval_step",
            "pad_to_max_length",
        ),
        *("data_path_prefix", "use_pretrain", "rewarmup", "lr_schedule", "lr_offset", "preln", "token_based_lr_decay"),
        *("analyzing_task", "analyzing_metric", "analyzing_num_threads", "analyzing_num_threads_reduce"),
        *("analyzing_worker_id", "sample_input", "vis_proj", "cuda", "p"),
    }
)
"""Flags of DeepSpeedExamples' own scripts: data, and how ranks find each other."""


def _read_chat_adapters(book: Notebook) -> None:
    """Read DeepSpeed-Chat's adapters, which stand in all linear layers below `lora_module_name`; dimension 0 is none.

    microsoft/DeepSpeedExamples@83757d9c `dschat/utils/module/lora.py`.
    """
    rank = book.whole("lora_dim")
    if not rank:
        return
    book.answer("method", "lora", "lora_dim")
    book.answer("lora_rank", rank, "lora_dim")
    book.answer("lora_targets", "all-linear", "lora_module_name")
    if book.flag("only_optimize_lora"):
        book.become("method", "lora", "only_optimize_lora")
    else:
        book.leave(
            "lora_dim", "embeddings and norms, which are trained beside the adapters, are not counted", matters=True
        )


def read_flags(book: Notebook, files: Files, command: str) -> None:
    """Read the flags of a script, or a JSON of `TrainingArguments`, whose model and length stand under usual names."""
    is_third = "actor_model_name_or_path" in book
    if is_third:
        _read_chat_rounds(book)
    _read_model(book)
    lengths = [key for key in _LENGTH_KEYS if key in book]
    for key in lengths[:1]:
        book.answer("seq_len", book.positive(key), key)
    if not lengths and not is_third:
        book.assume("no key says how long samples are; the model's own length counts")
    _read_adapters(book)
    _read_chat_adapters(book)
    dtype = book.word("dtype") or book.word("torch_dtype")
    book.become("load_dtype", dtype, "dtype", "torch_dtype")
    if dtype in ("bfloat16", "bf16") and "bf16" not in book:
        book.assume(f"weights are loaded in {dtype} and trained without autocast")
    loading = Loading(in_16_bits=dtype in ("bfloat16", "bf16"))
    is_chat = is_third or {"zero_stage", "data_split"} <= book.settings.keys()
    precision: words.Precision = "fp16" if dtype in ("fp16", "float16") or (is_chat and not dtype) else "fp32"
    if is_chat and dtype in ("bf16", "bfloat16"):
        precision = "bf16"
    read_training(book, files, loading=loading, recomputes=False, trainer="huggingface", precision=precision)
    _read_packing(book)
    _read_stage(book)
    book.close(
        without_effect=lambda key: key in _OF_SCRIPTS or without_effect(key),
        gaps={**GAPS, **_OF_EXAMPLES, **_CHAT_GAPS},
        names=(),
    )
