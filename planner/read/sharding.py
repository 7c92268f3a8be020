"""The spreading of states, as DeepSpeed's JSON, accelerate's YAML and the FSDP sections of other trainers say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner import vocabulary as words
from planner.read.documents import Files, parse_json_settings
from planner.read.form import TWO_PRECISIONS, Notebook
from planner.read.trainers import default_of, keys_of, read_optimizer, without_effect

# DeepSpeed.

_DEEPSPEED_GAPS: Mapping[str, str] = {
    "zero_optimization.mics_shard_size": "MiCS's groups of ranks are not counted",
    "zero_optimization.offload_optimizer.ratio": "all of the states is counted as offloaded",
    "zero_optimization.round_robin_gradients": "the order of gradients is not counted",
    "compression_training": "compressed weights are not counted",
    "sparse_attention": "sparse attention is not counted",
    "curriculum_learning": "sequences are counted at their full length",
    "data_efficiency": "sequences are counted at their full length",
    "progressive_layer_drop": "every layer is counted",
    "tensor_parallel": "DeepSpeed's AutoTP is not counted",
    "pipeline": "DeepSpeed's pipeline module is not counted",
    "activation_checkpointing.cpu_checkpointing": "the script decides whether DeepSpeed's checkpointing runs",
    "activation_checkpointing.partition_activations": "the script decides whether DeepSpeed's checkpointing runs",
    "communication_data_type": "gradients are counted in the compute type between ranks",
    "quantize_training": "quantised training is not counted",
}
_BUCKETS = frozenset(
    {
        *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        *("stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_max_live_parameters"),
        *("stage3_max_reuse_distance", "max_live_parameters", "max_reuse_distance", "sub_group_size", "overlap_comm"),
        *("contiguous_gradients", "reduce_scatter", "allgather_partitions", "load_from_fp32_weights"),
        *("ignore_unused_parameters", "stage3_max_live_parameters", "elastic_checkpoint", "allgather_size"),
    }
)
_PLAIN = frozenset(
    {
        *(
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "prescale_gradients",
            "gradient_predivide_factor",
        ),
        *(
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "gradient_clipping",
            "memory_breakdown",
            "comms_logger",
        ),
        *("flops_profiler", "tensorboard", "csv_monitor", "elasticity", "aio", "scheduler", "checkpoint", "autotuning"),
        *(
            "sparse_gradients",
            "disable_allgather",
            "seed",
            "data_types",
            "hybrid_engine",
            "amp",
            "monitor_config",
            "compile",
        ),
        *("fp32_allreduce", "timers", "use_data_before_expert_parallel_", "dataloader_drop_last"),
        *(
            "fp16",
            "bf16",
            "bfloat16",
            "optimizer",
            "activation_checkpointing",
            "nebula",
            "local_rank",
            "checkpoint_tag_validation",
        ),
    }
)


def read_deepspeed(book: Notebook) -> None:
    """Read a DeepSpeed config: stage, offload, precision, batch triple, optimizer; `auto` is left to who fills it in.

    DeepSpeed 0.19, `runtime/config.py` and `runtime/zero/config.py`; defaults from `trainers.json`.
    """
    zero = "zero_optimization"
    stage = book.whole(f"{zero}.stage")
    if stage is None:  # `true` is the form of its first releases
        stage = 1 if zero in book and book.raw(zero) is True else int(default_of("deepspeed", "stage"))
    strategy: words.Strategy = ("ddp", "zero1", "zero2", "zero3")[min(max(stage, 0), 3)]
    book.answer("strategy", strategy, f"{zero}.stage", zero)
    book.answer("backend", "deepspeed" if stage else "torch")
    _deepspeed_offload(book, stage)
    _deepspeed_precision(book)
    for field, key in (
        ("global_batch", "train_batch_size"),
        ("micro_batch", "train_micro_batch_size_per_gpu"),
        ("grad_accum", "gradient_accumulation_steps"),
    ):
        value = book.positive(key)
        if value is not None:
            book.answer(field, value, key)
        elif key in book:
            book.become(field, "auto", key)
    if "optimizer.type" in book:
        _deepspeed_optimizer(book)
    _zero_plus(book, stage)
    compression = book.word("communication_data_type")
    if compression in ("fp16", "bf16"):
        book.answer("gradient_compression", compression, "communication_data_type")
    for key in tuple(book.under("optimizer.params")):
        book.leave(key, "changes neither memory nor time", matters=False)
    for key in tuple(book.under(zero)):
        name = key.rpartition(".")[2]
        if name in _BUCKETS:
            book.leave(key, "buckets are counted at the sizes that dsplan emits", matters=False)
        elif "gather_16bit_weights" in name or "gather_fp16_weights" in name:
            book.leave(key, "is about saving, which is not counted", matters=False)


def read_deepspeed_alone(book: Notebook) -> None:
    """Read a DeepSpeed config that no trainer fills in: without a section for 16 bits it trains in fp32."""
    read_deepspeed(book)
    if "precision" not in book.answers and not any(book.under("bf16")) and not any(book.under("fp16")):
        book.answer("precision", "fp32")


def _deepspeed_optimizer(book: Notebook) -> None:
    """Read the optimizer: without `torch_adam` Adam is DeepSpeed's own, which is fused on a GPU."""
    read_optimizer(book, "optimizer.type", "adamw")
    flags = [f"optimizer.params.{name}" for name in ("torch_adam", "fused", "foreach")]
    if book.answers["optimizer"] != "adamw":
        return
    kind: words.Optimizer = "adamw"
    if book.answers.get("offload", "none") == "none":
        if not book.flag(flags[0]) or book.flag(flags[1]):
            kind = "adamw-fused"
        elif not book.flag(flags[2], True):
            kind = "adamw-forloop"
    book.answer("optimizer", kind, "optimizer.type", *flags)


_ZERO_PLUS = ("hpz", "quantized_weights", "quantized_gradients")


def _zero_plus(book: Notebook, stage: int) -> None:
    """Read ZeRO++'s keys, which are stage 3's."""
    partition = book.positive("zero_optimization.zero_hpz_partition_size", 1) or 1
    if stage == 3 and partition > 1:
        book.answer("hpz", partition, "zero_optimization.zero_hpz_partition_size")
    for name in ("quantized_weights", "quantized_gradients"):
        key = f"zero_optimization.zero_{name}"
        if stage == 3 and book.flag(key):
            book.answer(name, True, key)


def _deepspeed_offload(book: Notebook, stage: int) -> None:
    optimizer_key, param_key = (f"zero_optimization.offload_{name}.device" for name in ("optimizer", "param"))
    optimizer, param = (book.word(key) or "none" for key in (optimizer_key, param_key))
    old = "zero_optimization.cpu_offload"
    if book.flag(old):
        optimizer = "cpu"
        book.find("warning", "deprecated-key", "cpu_offload is deprecated; write offload_optimizer: {device: cpu}", old)
    if param not in ("none", "auto") and stage < 3:
        book.find(
            "warning", "ignored-key", f"offload_param is for stage 3; DeepSpeed's stage {stage} ignores it", param_key
        )
        param = "none"
    offload: words.Offload = "none"
    if "nvme" in (optimizer, param):
        offload = "nvme"
    elif param == "cpu":
        offload = "all"
    elif optimizer == "cpu":
        offload = "optimizer"
    if offload != "none" and stage == 0:
        book.find("warning", "ignored-key", "DeepSpeed offloads nothing at stage 0", optimizer_key)
        offload = "none"
    book.answer("offload", offload, optimizer_key, param_key, old)
    for key in tuple(book.under("zero_optimization")):
        if ".offload_" in key and key.rpartition(".")[2] in (
            *("pin_memory", "buffer_count", "buffer_size", "nvme_path", "max_in_cpu", "fast_init", "pipeline_read"),
            *("pipeline_write", "pipeline", "super_offload", "cpuadam_cores_perc"),
        ):
            book.leave(key, "is counted as dsplan emits it", matters=False)


def _deepspeed_precision(book: Notebook) -> None:
    bf16_keys, fp16_keys = ("bf16.enabled", "bfloat16.enabled"), ("fp16.enabled",)
    for precision, keys in (("bf16", bf16_keys), ("fp16", fp16_keys)):
        for key in keys:
            if key not in book:
                continue
            if book.word(key) == "auto":
                book.become("precision", "auto", key)
            elif book.flag(key) and precision == "fp16" and book.answers.get("precision") in ("bf16", "bf16-pure"):
                book.become("precision", "fp16, beside bf16", key)
                message = "bf16 and fp16 are both enabled, which DeepSpeed refuses; keep one"
                book.find("error", TWO_PRECISIONS, message, key)
            elif book.flag(key):
                book.answer("precision", precision, key)
                _deepspeed_pure(book, key.partition(".")[0])
            else:
                book.become("precision", f"not {precision}", key)
    key = "torch_autocast.dtype"
    if book.flag("torch_autocast.enabled"):
        book.answer("precision", "fp16" if "16" in book.word(key) and "bf" not in book.word(key) else "bf16", key)
    for section in ("bf16", "bfloat16", "fp16"):
        for key in tuple(book.under(section)):
            if not key.endswith("enabled"):
                book.leave(key, "changes neither memory nor time", matters=False)


def _deepspeed_pure(book: Notebook, section: str) -> None:
    """Read the keys by which weights, gradients and optimizer states are all kept in bf16."""
    keys = [f"{section}.bf16_{name}" for name in ("master_weights_and_grads", "optimizer_states")]
    if section != "fp16" and all(book.flag(key) for key in keys):
        book.answer("precision", "bf16-pure", *keys)


def close_deepspeed(book: Notebook) -> None:
    """Say of the keys of a DeepSpeed config that are left why they became nothing."""
    book.close(
        without_effect=lambda key: key.partition(".")[0] in _PLAIN,
        gaps=_DEEPSPEED_GAPS,
        names=keys_of("deepspeed") | _PLAIN | {"zero_optimization"},
    )


def stage_of_name(name: str) -> tuple[words.Strategy, words.Offload] | None:
    """Return stage and offload that the name of a DeepSpeed config says, as trainers ship them: `zero3_offload`."""
    lowered = name.lower()
    for stage in ("3", "2", "1"):
        if any(
            word in lowered
            for word in (f"zero{stage}", f"zero_{stage}", f"z{stage}_", f"z{stage}.", f"stage{stage}", f"stage_{stage}")
        ):
            strategy: words.Strategy = words.STRATEGIES[words.STRATEGIES.index("zero1") + int(stage) - 1]
            offload: words.Offload = "none"
            if "offload" in lowered or "cpu" in lowered:
                offload = "all" if stage == "3" else "optimizer"
            return strategy, offload
    return ("ddp", "none") if "zero0" in lowered or "z0_" in lowered else None


_OF_DEEPSPEED = frozenset({"strategy", "backend", "offload", "optimizer", "gradient_compression", *_ZERO_PLUS})
"""Fields of which DeepSpeed's config decides alone."""


def merge_deepspeed(book: Notebook, config: Notebook, key: str) -> None:
    """Take over what a DeepSpeed config says into the book of the trainer that names it; HF Trainer fills in `auto`.

    HF Trainer stops where both name a figure and differ (transformers, `integrations/deepspeed.py`, `fill_match`).
    `deepspeed_config` is a flag of scripts of their own (`deepspeed.add_config_arguments`), where the config counts.
    """
    names = {"micro_batch": "micro-batch", "grad_accum": "accumulation", "precision": "precision"}
    flags = {"micro_batch": "per_device_train_batch_size", "grad_accum": "gradient_accumulation_steps"}
    for field, value in config.answers.items():
        theirs = book.answers.get(field)
        is_pure = field == "precision" and value == "bf16-pure" and theirs in (None, "bf16")
        is_scripts = key == "deepspeed_config" and field in names and flags.get(field, "bf16") not in book
        if is_scripts or is_pure or field in _OF_DEEPSPEED:
            book.answers[field] = value
        elif field in names and theirs is not None and theirs != value:
            message = f"the DeepSpeed config's {names[field]} is {value}, the trainer's {theirs}, which stops the run"
            book.find("error", "contradiction", message, key)
        elif field == "global_batch":
            book.answers.setdefault(field, value)
    book.become("strategy", config.answers["strategy"], key)


# FSDP, in accelerate's YAML, HF's `fsdp_config` and axolotl's.

_SHARDING: Mapping[str, words.Strategy] = {
    **dict.fromkeys(("full_shard", "1"), "fsdp"),
    **dict.fromkeys(("shard_grad_op", "2"), "fsdp-grad-op"),
    **dict.fromkeys(("no_shard", "3"), "ddp"),
    **dict.fromkeys(("hybrid_shard", "hybrid_shard_zero2", "4", "5"), "hsdp"),
}


def read_fsdp(book: Notebook, prefix: str, options: str = "") -> None:
    """Read an FSDP section; `options` is a key of words such as `full_shard auto_wrap offload`."""
    words_of = book.raw(options) if options else None
    chosen = " ".join(map(str, words_of)) if isinstance(words_of, list) else str(words_of or "")
    option_words = chosen.replace(",", " ").lower().split()
    strategy: words.Strategy = next((_SHARDING[word] for word in option_words if word in _SHARDING), "fsdp")
    offloads = "offload" in option_words
    book.become("strategy", strategy, options)
    for name in ("sharding_strategy", "reshard_after_forward"):
        for key in (f"{prefix}.{name}", f"{prefix}.fsdp_{name}"):
            if key not in book:
                continue
            word = book.word(key)
            if word in _SHARDING:
                strategy = _SHARDING[word]
            elif name == "reshard_after_forward" and word in ("true", "false"):
                strategy = "fsdp" if word == "true" else "fsdp-grad-op"
            book.become("strategy", strategy, key)
    for key in (f"{prefix}.offload_params", f"{prefix}.fsdp_offload_params", f"{prefix}.cpu_offload"):
        if key in book:
            offloads = book.flag(key) or offloads
            book.become("offload", "all" if offloads else "none", key)
    for key in (f"{prefix}.activation_checkpointing", f"{prefix}.fsdp_activation_checkpointing"):
        if key in book:
            recomputes = book.flag(key)
            book.become("checkpointing", "full" if recomputes else "none", key)
            if recomputes:
                if book.answers.get("checkpointing") == "full":
                    message = (
                        "gradient_checkpointing beside FSDP's own activation_checkpointing recomputes twice; keep one"
                    )
                    book.find("warning", "recomputed-twice", message, key)
                book.answers["checkpointing"] = "full"
    book.answers.update(strategy=strategy, backend="torch", offload="all" if offloads else "none")


# accelerate.

_DISTRIBUTED: Mapping[str, str] = {
    "no": "single",
    "multi_gpu": "ddp",
    "multi_cpu": "ddp",
    "multi_npu": "ddp",
    "multi_xpu": "ddp",
    "deepspeed": "deepspeed",
    "fsdp": "fsdp",
    "megatron_lm": "megatron",
}


def read_accelerate(book: Notebook, files: Files | None = None) -> None:
    """Read an accelerate config, or the flags of `accelerate launch` under the same names.

    With `files` the DeepSpeed config that it names is read too.

    accelerate 1.15, `commands/config/config_args.py` and `utils/dataclasses.py`.
    """
    ranks = book.positive("num_processes")
    nodes = book.positive("num_machines")
    if ranks is not None:
        book.answer("gpus", ranks, "num_processes")
    if nodes is not None and nodes > 1:
        book.answer("nodes", nodes, "num_machines")
    else:
        book.become("nodes", nodes, "num_machines")
    precision = book.word("mixed_precision")
    if precision in ("bf16", "fp16", "fp8"):
        book.answer("precision", precision, "mixed_precision")
    elif precision == "no":
        book.answer("precision", "fp32", "mixed_precision")
    kind = _DISTRIBUTED.get(book.word("distributed_type"), "")
    if book.flag("use_deepspeed"):
        kind = "deepspeed"
    elif book.flag("use_fsdp"):
        kind = "fsdp"
    elif book.flag("multi_gpu"):
        kind = "ddp"
    if kind == "deepspeed":
        _accelerate_deepspeed(book)
        if files is not None:
            _deepspeed_file(book, files)
    elif kind == "fsdp":
        read_fsdp(book, "fsdp_config")
    elif kind == "ddp":
        book.answers.update(strategy="ddp", backend="torch")
    elif kind == "single":
        book.answers.update(strategy="single", backend="torch")
    elif kind == "megatron":
        book.leave("distributed_type", "accelerate's own Megatron-LM is not counted", matters=True)
    book.become("strategy", book.answers.get("strategy"), "distributed_type", "use_deepspeed", "use_fsdp", "multi_gpu")
    _accelerate_degrees(book)
    if "dynamo_config.dynamo_backend" in book and book.word("dynamo_config.dynamo_backend") not in ("no", ""):
        book.answer("compile", True, "dynamo_config.dynamo_backend")


def _accelerate_deepspeed(book: Notebook) -> None:
    section = "deepspeed_config"
    stage = book.whole(f"{section}.zero_stage")
    if stage is None:
        stage = 2  # accelerate.utils.dataclasses.DeepSpeedPlugin.zero_stage without a variable
    strategy = ("ddp", "zero1", "zero2", "zero3")[min(max(stage, 0), 3)]
    book.answer("strategy", strategy, f"{section}.zero_stage")
    book.answers["backend"] = "deepspeed" if stage else "torch"
    optimizer_key, param_key = f"{section}.offload_optimizer_device", f"{section}.offload_param_device"
    optimizer, param = book.word(optimizer_key) or "none", book.word(param_key) or "none"
    offload: words.Offload = "none"
    if "nvme" in (optimizer, param):
        offload = "nvme"
    elif param == "cpu" and stage == 3:
        offload = "all"
    elif optimizer == "cpu":
        offload = "optimizer"
    if param not in ("none", "") and stage < 3:
        book.find("warning", "ignored-key", f"parameters are offloaded at stage 3 alone, not at {stage}", param_key)
    book.answer("offload", offload, optimizer_key, param_key)
    accumulation = book.positive(f"{section}.gradient_accumulation_steps")
    if accumulation is not None:
        book.answer("grad_accum", accumulation, f"{section}.gradient_accumulation_steps")
    for key in tuple(book.under(section)):
        name = key.rpartition(".")[2]
        if name in ("zero3_init_flag", "zero3_save_16bit_model", "gradient_clipping", "deepspeed_multinode_launcher",
                    "deepspeed_hostfile", "deepspeed_moe_layer_cls_names"):  # fmt: skip
            book.leave(key, "changes neither memory nor time of a step", matters=False)


def _deepspeed_file(book: Notebook, files: Files) -> None:
    """Read the DeepSpeed config that accelerate's names, which then says all that its own section would."""
    key = "deepspeed_config.deepspeed_config_file"
    name = book.text(key)
    if name is None:
        return
    source, reason = files.find(name, book.settings[key].source)
    if source is None:
        book.leave(key, f"{name} {reason}", matters=True)
        return
    config = Notebook(parse_json_settings(source), "DeepSpeed")
    read_deepspeed_alone(config)
    close_deepspeed(config)
    book.answers.update(config.answers)
    book.become("strategy", config.answers["strategy"], key)
    book.understood += config.understood
    book.unread += config.unread
    book.findings += config.findings


def _accelerate_degrees(book: Notebook) -> None:
    """Read `parallelism_config`: its sizes multiply to the ranks."""
    prefix = "parallelism_config.parallelism_config_"
    sizes = {name: book.positive(f"{prefix}{name}_size", 1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    for name in ("tp", "cp"):
        if (sizes[name] or 1) > 1:
            book.answer(name, sizes[name], f"{prefix}{name}_size")
    if (sizes["dp_replicate"] or 1) > 1 and (sizes["dp_shard"] or 1) > 1:
        if book.answers.get("strategy") != "fsdp-grad-op":
            book.answer("strategy", "hsdp", f"{prefix}dp_replicate_size")
        book.answer("shard", (sizes["dp_shard"] or 1) * (sizes["cp"] or 1), f"{prefix}dp_shard_size")
    elif (sizes["dp_replicate"] or 1) > 1 and max(sizes["tp"] or 1, sizes["cp"] or 1) > 1:
        message = "accelerate refuses dp_replicate_size without dp_shard_size beside tp or cp; shard over two or more"
        book.find("error", "replicas-without-shards", message, f"{prefix}dp_replicate_size")
    for name in ("dp_replicate", "dp_shard"):
        book.become(name, sizes[name], f"{prefix}{name}_size")


def close_accelerate(book: Notebook) -> None:
    """Say of the keys of an accelerate config that are left why they became nothing."""
    book.close(
        without_effect=without_effect,
        gaps={
            "parallelism_config": "sequence parallelism of accelerate is not counted",
            "deepspeed_config.seq_parallel_communication_data_type": "sequence parallelism is not counted",
            "fp8_config": "fp8 recipes are counted by tensor",
            "megatron_lm_config": "accelerate's own Megatron-LM is not counted",
            "kt_config": "KTransformers' experts on the CPU are not counted",
            "use_kt": "KTransformers' experts on the CPU are not counted",
        },
        names=keys_of("accelerate") | {"dynamo_config", "fsdp_config", "deepspeed_config", "distributed_type"},
        refuses_unknown=True,
    )


KEPT_IN_16_BITS = "all weights are trained in the bf16 that they are loaded in, optimizer states too"
"""What is said of replicas of weights that a trainer loads in 16 bits."""


def merge_accelerate(book: Notebook, outer: Mapping[str, Any]) -> None:
    """Take over what accelerate's config says into a trainer's book that says nothing of it itself."""
    own = book.answers.get("strategy")
    spreads = outer.get("strategy")
    if own is None and spreads not in (None, "single", "ddp") and book.answers.get("precision") == "bf16-pure":
        book.answers["precision"] = "bf16"  # shards have fp32 masters, whatever the weights were loaded in
        book.findings = [item for item in book.findings if item.message != KEPT_IN_16_BITS]
    if own is not None and spreads is not None and own.startswith("zero") and spreads.startswith("fsdp"):
        message = f"accelerate's config asks for FSDP and the trainer's for DeepSpeed ({own}); the trainer's counts"
        book.find("warning", "contradiction", message)
    for field in (
        "strategy",
        "backend",
        "offload",
        "checkpointing",
        "gpus",
        "nodes",
        "tp",
        "cp",
        "compile",
        "grad_accum",
        "shard",
        "gradient_compression",
        *_ZERO_PLUS,
    ):
        if field not in outer:
            continue
        if field == "strategy" and outer.get("precision") == "bf16-pure" and book.answers.get("precision") == "bf16":
            book.answers["precision"] = "bf16-pure"
        if field == "checkpointing" and outer[field] == "full" and book.answers.get(field) == "full":
            message = "gradient_checkpointing beside FSDP's own activation_checkpointing recomputes twice; keep one"
            book.find("warning", "recomputed-twice", message)
        if (
            field in ("gpus", "nodes")
            or field not in book.answers
            or (field == "checkpointing" and outer[field] == "full")
        ):
            book.answers[field] = outer[field]
    if book.answers.get("load_dtype") == "fp32" and str(book.answers.get("strategy")).startswith("zero"):
        del book.answers["load_dtype"]  # DeepSpeed casts what it is given to its precision
