"""OpenRLHF's flags, dotted as since 0.9 or plain as before: OpenRLHF/OpenRLHF@3c3be623 `openrlhf/cli/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import COMMAND, Notebook, Setting
from planner.read.rounds import ROUND, read_rounds
from planner.read.trainers import default_of, lora_targets, read_attention, read_optimizer, set_task, without_effect

_NEW: Mapping[str, str] = {
    "pretrain": "model.model_name_or_path",
    "actor.model_name_or_path": "model.model_name_or_path",
    "max_len": "data.max_len",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "zero_stage": "ds.zero_stage",
    "bf16": "ds.bf16",
    "param_dtype": "ds.param_dtype",
    "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples",
    "flash_attn": "ds.flash_attn",
    "attn_implementation": "ds.attn_implementation",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "lora_rank": "ds.lora.rank",
    "lora.rank": "ds.lora.rank",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "use_liger_kernel": "ds.use_liger_kernel",
    "ring_attn_size": "ds.ring_attn_size",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "actor.optim": "optim",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
}
"""Older flags, and those of the actor, under the names that they have now."""
OLDER: Mapping[str, str] = {new: old for old, new in reversed(tuple(_NEW.items())) if "." not in old}
"""The names that flags had."""
_GAPS: Mapping[str, str] = {
    "vllm": ROUND,
    "rollout": ROUND,
    "critic": "a further model is not counted",
    "reward": "a further model is not counted",
    "ref": "the frozen copy is counted as the actor is spread",
    "ds.packing_samples": "samples are counted at their full length",
    "ds.zpg": "ZeRO++'s second copy of the weights is not counted",
    "ds.tensor_parallel_size": "DeepSpeed's AutoTP is not counted",
    "ds.deepcompile": "compiled blocks are not counted",
    "train.dynamic_batch_enable": "micro-batches are counted by samples",
    "colocate_all_models": ROUND,
    "critic_pretrain": "a further model is not counted",
    "reward_pretrain": "a further model is not counted",
    "remote_rm_url": "a further model is not counted",
    "aux_loss_coef": "the router's loss is not counted",
}
_PLAIN = re.compile(
    r"""(ckpt|logger|eval|adam|data|algo|optim|lr|loss|train|ray|model|ds\.(overlap.*|grad_accum.*|use_universal.*|lora\.(alpha|dropout)
    |enable_.*|bf16|flash_attn|ring_.*)|use_wandb|wandb.*|input_.*|output_.*|apply_.*|save_.*|load_.*|max_.*|n_samples.*|init_kl.*|normalize.*
    |gamma|lambd|prompt_.*|label_.*|rollout\.(temp.*|top_.*)|actor|agent.*|vllm\.(sync.*|num_.*)|advantage.*|use_kl.*|beta|ref_num.*
    |micro_rollout.*|freezing.*|kl_.*|eps_.*|entropy.*|local_rank|perf|async.*|enforce.*|submit.*|working_dir|runtime_env.*|address)(\..*)?$""",
    re.VERBOSE,
)
_METHODS = {"train_sft": "sft", "train_dpo": "dpo", "train_rm": "reward", "train_kto": "kto", "train_ppo_ray": "ppo"}


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are OpenRLHF's flags; it has no config files."""
    return False


def prepare(settings: Iterable[Setting]) -> list[Setting]:
    """Return flags under the names that they have now."""
    return [replace(item, key=_NEW.get(item.key, item.key)) for item in settings]


def read(book: Notebook, files: Files) -> None:
    """Read OpenRLHF's flags; the actor's update is counted."""
    book.answer("model", book.text("model.model_name_or_path"), "model.model_name_or_path")
    program = (book.text(COMMAND) or "").rpartition(".")[2]
    method = next((word for name, word in _METHODS.items() if name in program), "sft")
    if method == "sft":
        book.answer("task", "causal-lm")
    elif method != "ppo":
        set_task(book, COMMAND, method)
    length = book.positive("data.max_len")
    if length is None:
        prompt, response = book.positive("data.prompt_max_len"), book.positive("rollout.max_new_tokens")
        length = (prompt or 1024) + (response or 1024)
        book.become("seq_len", length, "data.prompt_max_len", "rollout.max_new_tokens")
    book.answer("seq_len", length, "data.max_len")
    for field, key in (("micro_batch", "train.micro_batch_size"), ("global_batch", "train.batch_size")):
        book.answer(field, book.positive(key, default_of("openrlhf", key)), key)
    stage = book.whole("ds.zero_stage", default_of("openrlhf", "ds.zero_stage")) or 2
    strategy: words.Strategy = ("ddp", "zero1", "zero2", "zero3")[min(max(stage, 0), 3)]
    book.answer("strategy", strategy, "ds.zero_stage")
    book.answer("backend", "deepspeed" if stage else "torch")
    book.answer("offload", "optimizer" if book.flag("ds.adam_offload") else "none", "ds.adam_offload")
    read_optimizer(book, "optim", "adamw-fused")
    if book.answers["optimizer"] == "adamw":  # utils/deepspeed: `adam` is DeepSpeed's FusedAdam
        book.answer("optimizer", "adamw-fused", "optim")
    dtype = book.word("ds.param_dtype", "bf16")
    book.answer("precision", "fp16" if dtype in ("fp16", "float16") else "bf16", "ds.param_dtype", "ds.bf16")
    if book.flag("ds.flash_attn"):
        book.answer("attention", "flash", "ds.flash_attn")
    else:
        read_attention(book, "ds.attn_implementation", "flash")
    recomputes = book.flag("model.gradient_checkpointing_enable")
    book.answer("checkpointing", "full" if recomputes else "none", "model.gradient_checkpointing_enable")
    if book.flag("ds.use_liger_kernel"):
        book.answer("loss", "fused", "ds.use_liger_kernel")
    rank = book.whole("ds.lora.rank", 0)
    if rank:
        book.answer("method", "qlora" if book.flag("ds.load_in_4bit") else "lora", "ds.lora.rank", "ds.load_in_4bit")
        book.answer("lora_rank", rank, "ds.lora.rank")
        book.answer(
            "lora_targets", lora_targets(book.raw("ds.lora.target_modules", "all-linear")), "ds.lora.target_modules"
        )
    ring = book.positive("ds.ring_attn_size", 1) or 1
    if ring > 1:
        book.answer("cp", ring, "ds.ring_attn_size")
    per_node, nodes = book.positive("actor.num_gpus_per_node"), book.positive("actor.num_nodes", 1)
    if per_node is not None:
        book.answer("gpus", per_node * (nodes or 1), "actor.num_gpus_per_node", "actor.num_nodes")
    if method == "ppo":
        estimator = book.word("algo.advantage.estimator", "gae")
        read_rounds(book, "openrlhf", COMMAND, "ppo" if estimator == "gae" else "grpo")
        book.become("task", book.answers["task"], "algo.advantage.estimator")
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())
