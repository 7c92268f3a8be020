"""NeMo-RL's YAML, whose `defaults` name another one.

NVIDIA-NeMo/RL@7ea279ab `examples/configs/` and `nemo_rl/models/policy/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from planner import vocabulary as words
from planner.read.documents import Files, parse_config
from planner.read.form import Notebook, Setting, follow_references
from planner.read.rounds import ROUND, read_rounds
from planner.read.trainers import lora_targets, read_optimizer, read_recomputed_modules, set_task, without_effect

_GAPS: Mapping[str, str] = {
    "grpo": ROUND,
    "policy.generation": ROUND,
    "policy.generation_batch_size": ROUND,
    "policy.sequence_packing": "samples are counted at their full length",
    "policy.dynamic_batching": "samples are counted at their full length",
    "policy.quant_cfg": "quantised weights are not counted",
    "policy.offload_optimizer_for_logprob": "states that leave the GPU between phases are not counted",
    "policy.draft": "a further model is not counted",
    "policy.reward_model_cfg": "a head of its own is counted as the language model's",
    "policy.hf_config_overrides": "changes of the model's own config are not counted",
    "policy.megatron_cfg.moe_per_layer_logging": "",
    "policy.megatron_cfg.model_overrides": "changes of the model's own config are not counted",
    "policy.megatron_cfg.fine_grained_activation_offloading": "activations in host memory are not counted",
    "policy.megatron_cfg.cuda_graph_impl": "launches are counted as without CUDA graphs",
    "policy.megatron_cfg.fp8_cfg": "fp8 products are counted where they are enabled",
    "policy.megatron_cfg.distributed_data_parallel_config": "buckets are counted as dsplan's own",
    "policy.megatron_cfg.mtp_num_layers": "layers that predict further tokens are not counted",
    "policy.megatron_cfg.moe_enable_deepep": "experts' exchanges are counted as NCCL's",
    "policy.megatron_cfg.expert_tensor_parallel_size": "experts are counted whole on their ranks",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": "stages are counted as equal",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": "stages are counted as equal",
    "policy.megatron_cfg.pipeline_model_parallel_layout": "stages are counted as equal",
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": "its optimizer in host memory is not counted",
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": "states narrower than fp32 are not counted",
    "policy.dtensor_cfg.automodel_kwargs": "kernels of a backend are counted as torch's",
    "teacher": "a further model is not counted",
    "teachers": "a further model is not counted",
    "on_policy_distillation": "a further model is not counted",
    "value_loss_fn": "a further model is not counted",
    "policy.router_replay": "the routes that generation hands over are not counted",
    "policy.is_vlm": "of models that see, the language model is counted",
    **dict.fromkeys(
        (f"policy.quant_{name}" for name in ("calib_data", "calib_size", "batch_size", "sequence_length")),
        "quantised weights are not counted",
    ),
    "policy.disable_modelopt_layer_spec": "quantised weights are not counted",
    "policy.dequantize_base_checkpoint": "quantised weights are not counted",
    "value": "a further model is not counted",
    "distillation": "a further model is not counted",
    "env": "environments and their models are not counted",
    "reward": "a further model is not counted",
}
_PLAIN = re.compile(
    r"""(data_plane|reward_penalties|checkpointing|logger|data|loss_fn|sft|dpo|rm|tokenizer|defaults|async_rl|eval|cluster|ppo|policy\.(activation_checkpointing_enabled|dtensor_cfg\.moe_parallelizer.*|tokenizer|max_grad_norm|scheduler|optimizer
    |make_sequence.*|refit.*|logprob.*|env_vars|precision|model_name|dtensor_cfg\.(_v2|env_vars|custom_.*|clear_cache.*|lora_cfg.*|enabled|dp_.*
    |sequence_parallel)|megatron_cfg\.(checkpoint|empty_.*|scheduler|optimizer|converter.*|env_vars|force_.*|moe_router.*|freeze.*|moe_permute.*
    |apply_rope.*|bias_.*|gradient_.*|moe_.*|enabled|use_.*|fused.*|layernorm.*|defer.*|track.*|rope.*|peft.*|lora.*|pipeline_dtype|attention.*
    |context.*|tensor.*|pipeline.*|expert.*|sequence.*|train_iters|activation.*|linear.*|distributed.*|overlap.*|cross_entropy.*|keep.*
    |radio_.*|clear_memory.*|do_not_average.*|cp_normalize|calculate_per.*|scale_loss.*|mtp_(?!num_layers).*|cuda_graph_(modules|warmup.*)|offload_modules))
    |grpo\.(seed|val_.*|max_.*|normalize.*|use_.*|overlong.*|adv.*|reward.*|seq_.*|skip.*|calculate.*|log.*|batch.*|async.*|dynamic.*))(\..*)?$""",
    re.VERBOSE,
)
_MOST_INCLUDES = 8
_WORDS: Mapping[str, str] = {"rm": "reward"}
_SECTIONS = frozenset(
    {
        *("defaults", "checkpointing", "cluster", "data", "logger", "grpo", "sft", "dpo", "rm", "ppo", "distillation"),
        *("data_plane", "async_rl", "env", "loss_fn", "value", "policy", "teacher", "reward"),
    }
)
"""Sections of a config over another one's."""
_OF_EVALUATION = frozenset({"defaults", "eval", "generation", "data", "env", "tokenizer", "cluster"})
_PRODUCT = re.compile(r"\$\{mul:\s*(\d+)\s*,\s*(\d+)\s*\}")
"""A resolver that NeMo-RL registers with OmegaConf (`nemo_rl/utils/config.py`)."""


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are the keys of NeMo-RL's YAML."""
    first = {key.partition(".")[0] for key in keys}
    if "defaults" in keys and first <= _SECTIONS and not {"generation", "eval"} & first:
        return True
    if _evaluates(first):
        return True
    has_policy = any(key.startswith("policy.") for key in keys)
    return "policy.model_name" in keys or (has_policy and ("defaults" in keys or "cluster.num_nodes" in keys))


def _evaluates(sections: Set[str]) -> bool:
    """Return whether sections are those of `examples/run_eval.py`, which generates answers and scores them."""
    return {"generation", "data"} <= sections <= _OF_EVALUATION


def why_no_training(book: Notebook) -> str:
    """Return what a config is for where that is no training; empty where it is."""
    return (
        "evaluates a model and trains nothing" if _evaluates({key.partition(".")[0] for key in book.settings}) else ""
    )


def prepare(settings: Iterable[Setting], files: Files) -> list[Setting]:
    """Return settings over those of the files that their `defaults` name, with references between them followed."""
    layers = [list(settings)]
    for _ in range(_MOST_INCLUDES):
        named = next((item for item in layers[0] if item.key == "defaults" and isinstance(item.value, str)), None)
        if named is None:
            break
        source, _ = files.find(str(named.value), named.source)
        if source is None:
            break
        layers[0] = [item for item in layers[0] if item.key != "defaults"]
        layers.insert(0, parse_config(source)[0])
    merged = {item.key: item for layer in layers for item in layer}
    return [_multiplied(item) for item in follow_references(merged.values())]


def _multiplied(setting: Setting) -> Setting:
    """Return a setting whose value is a number where it is written as the product of two."""
    product = _PRODUCT.fullmatch(setting.value) if isinstance(setting.value, str) else None
    if product is None:
        return setting
    return replace(setting, value=int(product[1]) * int(product[2]), start=-1, end=-1)


def read(book: Notebook, files: Files) -> None:
    """Read NeMo-RL's keys: the policy's update."""
    if "defaults" in book:
        book.leave("defaults", f"{book.text('defaults')} is not in the folder; name it beside this file", matters=True)
    book.answer("model", book.text("policy.model_name"), "policy.model_name")
    sections = {key.partition(".")[0] for key in book.settings}
    method = next((name for name in ("grpo", "dpo", "rm", "distillation", "ppo", "sft") if name in sections), "")
    rounds = ""
    if method in ("", "sft"):
        book.answer("task", "causal-lm")
    else:
        word, key = _WORDS.get(method, method), next(key for key in book.settings if key.startswith(f"{method}."))
        if method == "grpo":
            rounds = key
        else:
            set_task(book, key, word)
    book.answer("micro_batch", book.positive("policy.train_micro_batch_size", 1), "policy.train_micro_batch_size")
    total = book.positive("policy.train_global_batch_size")
    if total is not None:
        book.answer("global_batch", total, "policy.train_global_batch_size")
    length = book.positive("policy.max_total_sequence_length")
    if length is not None:
        book.answer("seq_len", length, "policy.max_total_sequence_length")
    for key in (f"{method}.max_num_steps", "sft.max_num_steps"):
        steps = book.whole(key)
        if steps and steps > 0 and book.steps is None:
            book.steps = steps
            book.become("steps", steps, key)
    per_node, nodes = book.positive("cluster.gpus_per_node"), book.positive("cluster.num_nodes")
    if per_node is not None:
        book.answer("gpus", per_node * (nodes or 1), "cluster.gpus_per_node", "cluster.num_nodes")
        if nodes is not None and nodes > 1:
            book.answer("nodes", nodes, "cluster.num_nodes")
    if rounds:
        read_rounds(book, "nemo-rl", rounds, "grpo")
    precision = book.word("policy.precision", "bfloat16")
    word = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(precision, "bf16")
    book.answer("precision", word, "policy.precision")
    if book.flag("policy.megatron_cfg.enabled"):
        _read_megatron(book)
    else:
        _read_dtensor(book)
    for key in tuple(book.under("policy.megatron_cfg" if "code" not in book.answers else "policy.dtensor_cfg")):
        book.leave(key, "belongs to the backend that is not enabled", matters=False)
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


def _read_dtensor(book: Notebook) -> None:
    section = "policy.dtensor_cfg."
    book.answer("strategy", "fsdp", f"{section}enabled")
    for field, name in (
        ("tp", "tensor_parallel_size"),
        ("cp", "context_parallel_size"),
        ("ep", "expert_parallel_size"),
    ):
        book.answer(field, book.positive(f"{section}{name}", 1), f"{section}{name}")
    copies = book.positive(f"{section}dp_replicate_size", 1) or 1
    if copies > 1:
        book.answer("strategy", "hsdp", f"{section}dp_replicate_size")
        book.answer("copies", copies, f"{section}dp_replicate_size")
    if book.flag(f"{section}sequence_parallel") and book.answers["tp"] > 1:
        book.answer("sequence_parallel", True, f"{section}sequence_parallel")
    offloads = book.flag(f"{section}cpu_offload")
    book.answer("offload", "all" if offloads else "none", f"{section}cpu_offload")
    recomputes = book.flag(f"{section}activation_checkpointing")
    book.answer("checkpointing", "full" if recomputes else "none", f"{section}activation_checkpointing")
    if book.flag(f"{section}lora_cfg.enabled"):
        book.answer("method", "lora", f"{section}lora_cfg.enabled")
        book.answer("lora_rank", book.positive(f"{section}lora_cfg.dim", 8), f"{section}lora_cfg.dim")
        targets = book.raw(f"{section}lora_cfg.target_modules") or "all-linear"
        every = book.flag(f"{section}lora_cfg.match_all_linear")
        keys = (f"{section}lora_cfg.match_all_linear", f"{section}lora_cfg.target_modules")
        book.answer("lora_targets", "all-linear" if every else lora_targets(targets), *keys)
    read_optimizer(book, "policy.optimizer.name", "adamw")
    fused, foreach = (f"policy.optimizer.kwargs.{name}" for name in ("fused", "foreach"))
    if book.answers["optimizer"] == "adamw" and (fused in book or foreach in book):
        is_loop = not book.flag(foreach, True)
        kind: words.Optimizer = "adamw-fused" if book.flag(fused) else "adamw-forloop" if is_loop else "adamw"
        book.answer("optimizer", kind, "policy.optimizer.name", fused, foreach)


def _read_megatron(book: Notebook) -> None:
    section = "policy.megatron_cfg."
    book.answer("code", "megatron", f"{section}enabled")
    degrees: tuple[tuple[words.Degree, str], ...] = (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"))
    for field, name in degrees:
        key = f"{section}{name}_model_parallel_size"
        book.answer(field, book.positive(key, 1), key)
    book.answer("cp", book.positive(f"{section}context_parallel_size", 1), f"{section}context_parallel_size")
    if "sequence_parallel" in {key.removeprefix(section) for key in book.settings}:
        splits = book.flag(f"{section}sequence_parallel") and book.answers["tp"] > 1
        book.answer("sequence_parallel", splits, f"{section}sequence_parallel")
    sharded = book.flag(f"{section}optimizer.use_distributed_optimizer", True)
    book.answer("strategy", "zero1" if sharded else "ddp", f"{section}optimizer.use_distributed_optimizer")
    recomputes = book.flag(f"{section}activation_checkpointing")
    depth: words.Checkpointing = "selective" if book.word(f"{section}recompute_granularity") == "selective" else "full"
    keys = (f"{section}activation_checkpointing", f"{section}recompute_granularity")
    book.answer("checkpointing", depth if recomputes else "none", *keys)
    modules = f"{section}recompute_modules"
    if book.answers["checkpointing"] == "selective":
        read_recomputed_modules(book, modules)
    else:
        book.leave(modules, "is for selective recomputation", matters=False)
    read_optimizer(book, f"{section}optimizer.optimizer", "adamw-fused")
    if book.flag(f"{section}fp8_cfg.enabled"):
        book.answer("precision", "fp8", f"{section}fp8_cfg.enabled")
