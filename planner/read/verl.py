"""verl's hydra overrides over its schema; the actor's update is counted.

volcengine/verl@b178a3cd `verl/trainer/config/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner import vocabulary as words
from planner.read.documents import Files
from planner.read.form import Notebook
from planner.read.rounds import ROUND, read_rounds
from planner.read.trainers import lora_targets, read_attention, read_optimizer, without_effect

_GAPS: Mapping[str, str] = {
    "actor_rollout_ref.rollout": ROUND,
    "actor_rollout_ref.ref": "the frozen copy is counted as the actor is spread",
    "critic": "a further model is not counted",
    "reward_model": "a further model is not counted",
    "reward": "a further model is not counted",
    "actor_rollout_ref.actor.use_dynamic_bsz": "micro-batches are counted by samples",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "micro-batches are counted by samples",
    "actor_rollout_ref.model.use_remove_padding": "samples are counted at their full length",
    "actor_rollout_ref.actor.use_torch_compile": "only entropy is compiled, which is not counted",
    "actor_rollout_ref.model.enable_activation_offload": "activations in host memory are not counted",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": "logits are counted whole",
    "actor_rollout_ref.actor.entropy_checkpointing": "logits are counted whole",
    "actor_rollout_ref.actor.megatron": "Megatron's further arguments are not counted",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "prefetching is counted as torch's own",
    "actor_rollout_ref.hybrid_engine": ROUND,
    "data.gen_batch_size": "generation is not counted",
    "distillation": "a further model is not counted",
    "engine": "the engine's further arguments are not counted",
    "use_remove_padding": "samples are counted at their full length",
    "actor_rollout_ref.model.mtp": "layers that predict further tokens are not counted",
    "actor_rollout_ref.actor.use_prefix_grouper": "samples are counted at their full length",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": "products are counted in bf16 and reductions in fp32",
    "rollout": ROUND,
    "defaults": "what the config of this name sets is not read",
    "config_name": "what the config of this name sets is not read",
    "ulysses_sequence_parallel_size": "Ulysses is counted as context parallelism",
}
_OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""Of `verl/trainer/config/`, whose defaults are those that are read here."""
_PLAIN = re.compile(
    r"""(checkpoint|data|algorithm|trainer|optim|custom_reward_function|ray_kwargs|ray_init|global_profiler|transfer_queue|reward_manager|hydra.*
    |--config.*|reward_kwargs|overlong_buffer|actor_rollout_ref\.(nccl_timeout|actor\.(fsdp_config\.(use_orig_params|wrap_policy)|optim|kl_.*|use_kl.*|entropy_coeff|clip.*|loss.*|grad_clip
    |checkpoint|shuffle|ppo_epochs|policy_loss|profiler|strategy|ppo_mini.*|data_loader.*|tau.*|router.*|freeze.*|calculate.*|load_weight)
    |model\.(torch_dtype|lora\.(alpha|lora_.*|dropout)|fused_kernel_options|trust_remote.*|external_lib|custom_.*|use_shm|tokenizer.*|path|override_config|lora_alpha|exclude.*)|rollout\.(temperature|top_.*
    |val_kwargs.*|name|seed|do_sample|load_format|mode|multi_turn.*|trace.*|agent.*|calculate.*|skip.*))
    |critic\.(optim|cliprange.*|loss.*|grad_clip|checkpoint|ppo_epochs|shuffle|enable)|model\.(trust_remote.*|lora_alpha|custom.*|external.*
    |override.*|use_.*|strategy))(\..*)?$""",
    re.VERBOSE,
)


def recognise(keys: frozenset[str]) -> bool:
    """Return whether these are verl's keys."""
    return any(key.startswith("actor_rollout_ref.") for key in keys) or "model.partial_pretrain" in keys


def read(book: Notebook, files: Files) -> None:
    """Read verl's keys: those of its RL trainers, or of its SFT trainer."""
    if any(book.under("actor_rollout_ref")):
        _read_actor(book)
    else:
        _read_sft(book)
    per_node, nodes = book.positive("trainer.n_gpus_per_node", 8), book.positive("trainer.nnodes", 1)
    if "trainer.n_gpus_per_node" in book or "trainer.nnodes" in book:
        book.answer("gpus", (per_node or 8) * (nodes or 1), "trainer.n_gpus_per_node", "trainer.nnodes")
        if nodes is not None and nodes > 1:
            book.answer("nodes", nodes, "trainer.nnodes")
    steps = book.positive("trainer.total_training_steps")
    if steps:
        book.steps = steps
        book.become("steps", steps, "trainer.total_training_steps")
    book.close(without_effect=lambda key: _PLAIN.match(key) is not None or without_effect(key), gaps=_GAPS, names=())


def _read_actor(book: Notebook) -> None:
    actor, model = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
    book.answer("model", book.text(f"{model}path"), f"{model}path")
    estimator = book.word("algorithm.adv_estimator", "gae")
    prompt, response = book.positive("data.max_prompt_length", 512), book.positive("data.max_response_length", 512)
    book.answer("seq_len", (prompt or 0) + (response or 0), "data.max_prompt_length", "data.max_response_length")
    micro = book.positive(f"{actor}ppo_micro_batch_size_per_gpu", 1)
    book.answer("micro_batch", micro, f"{actor}ppo_micro_batch_size_per_gpu")
    whole = f"{actor}ppo_micro_batch_size"
    if whole in book and f"{actor}ppo_micro_batch_size_per_gpu" not in book:  # of all ranks, as before 0.2
        ranks = (book.positive("trainer.n_gpus_per_node", 8) or 8) * (book.positive("trainer.nnodes", 1) or 1)
        book.answer("micro_batch", max((book.positive(whole) or ranks) // ranks, 1), whole)
    samples = book.positive("actor_rollout_ref.rollout.n", 1) or 1
    mini = book.positive(f"{actor}ppo_mini_batch_size", 256)
    keys = (f"{actor}ppo_mini_batch_size", "actor_rollout_ref.rollout.n", "data.train_batch_size")
    book.answer("global_batch", (mini or 256) * samples, *keys)
    recomputes = book.flag(f"{model}enable_gradient_checkpointing", True)
    book.answer("checkpointing", "full" if recomputes else "none", f"{model}enable_gradient_checkpointing")
    kept = f"{actor}fsdp_config.model_dtype"  # fsdp_workers.py: fp32 weights of the actor, bf16 compute
    book.answer("precision", "bf16-pure" if book.word(kept) in ("bfloat16", "bf16") else "bf16", kept)
    if book.flag(f"{model}use_liger"):
        book.answer("loss", "fused", f"{model}use_liger")
    if book.flag(f"{model}use_fused_kernels"):
        book.answer("loss", "fused", f"{model}use_fused_kernels")
    _read_lora(book, model)
    read_rounds(book, "verl", "algorithm.adv_estimator", "ppo" if estimator == "gae" else "grpo")
    _read_optimizer(book, f"{actor}optim.")
    read_attention(book, f"{model}override_config.attn_implementation", "flash")
    name = book.word("config_name").removesuffix(".yaml")
    if name in _OWN_CONFIGS:
        book.become("code", "megatron" if "megatron" in name else "fsdp", "config_name")
    default = "megatron" if name == "ppo_megatron_trainer" else "fsdp"
    if book.word(f"{actor}strategy", default) == "megatron" or any(book.under(f"{actor}megatron")):
        _read_megatron(book, f"{actor}megatron.")
    else:
        _read_fsdp(book, f"{actor}fsdp_config.", f"{actor}ulysses_sequence_parallel_size")


def _read_optimizer(book: Notebook, section: str) -> None:
    """Read `optim/fsdp.yaml`: a class, and what is passed on to it."""
    read_optimizer(book, f"{section}optimizer", "adamw")
    fused = f"{section}override_optimizer_config.fused"
    if book.answers["optimizer"] == "adamw" and book.flag(fused):
        book.answer("optimizer", "adamw-fused", f"{section}optimizer", fused)


def _read_lora(book: Notebook, section: str) -> None:
    keys = (f"{section}lora_rank", f"{section}lora.rank")  # the second one of Megatron's engine
    rank = book.whole(keys[0], 0) or book.whole(keys[1], 0)
    if rank:
        book.answer("method", "lora", *keys)
        book.answer("lora_rank", rank, *keys)
        targets = lora_targets(book.raw(f"{section}target_modules", "all-linear"))
        book.answer("lora_targets", targets, f"{section}target_modules")


def _read_fsdp(book: Notebook, section: str, ulysses: str) -> None:
    book.answer("strategy", "fsdp")
    weights, states = f"{section}param_offload", f"{section}optimizer_offload"
    if book.flag(f"{section}offload_policy") or book.flag("model.fsdp_config.cpu_offload"):
        book.answer("offload", "all", f"{section}offload_policy", "model.fsdp_config.cpu_offload")
    elif book.flag(weights) or book.flag(states):
        for key in (weights, states):
            book.leave(key, "what leaves the GPU between phases is there while it is updated", matters=False)
    degree = book.positive(ulysses, 1)
    if degree and degree > 1:
        book.answer("cp", degree, ulysses)
    book.become("cp", degree, ulysses)
    size = book.whole(f"{section}fsdp_size", -1)
    if size is not None and size > 1:  # fsdp_workers.py, create_device_mesh
        book.answer("strategy", "hsdp", f"{section}fsdp_size")
        book.answer("shard", size, f"{section}fsdp_size")


def _read_megatron(book: Notebook, section: str) -> None:
    book.answer("code", "megatron")
    book.answer("strategy", "zero1")
    degrees: tuple[tuple[words.Degree, str], ...] = (
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
        ("cp", "context_parallel_size"),
        ("ep", "expert_model_parallel_size"),
    )
    for field, name in degrees:
        book.answer(field, book.positive(f"{section}{name}", 1), f"{section}{name}")
    granularity = book.word(f"{section}override_transformer_config.recompute_granularity")
    if granularity in ("full", "selective"):
        key = f"{section}override_transformer_config.recompute_granularity"
        book.answer("checkpointing", granularity, key)


def _read_sft(book: Notebook) -> None:
    book.answer(
        "model", book.text("model.partial_pretrain") or book.text("model.path"), "model.partial_pretrain", "model.path"
    )
    book.answer("task", "causal-lm")
    book.answer("seq_len", book.positive("data.max_length", 1024), "data.max_length")
    book.answer("micro_batch", book.positive("data.micro_batch_size_per_gpu", 4), "data.micro_batch_size_per_gpu")
    book.answer("global_batch", book.positive("data.train_batch_size", 256), "data.train_batch_size")
    recomputes = book.flag("model.enable_gradient_checkpointing", True)
    book.answer("checkpointing", "full" if recomputes else "none", "model.enable_gradient_checkpointing")
    book.answer("precision", "bf16")
    if book.flag("model.use_liger"):
        book.answer("loss", "fused", "model.use_liger")
    _read_lora(book, "model.")
    _read_optimizer(book, "optim.")
    read_attention(book, "model.override_config.attn_implementation", "flash")
    if any(book.under("engine")):  # of `sft_trainer`, whose engine is a section of its own
        _read_fsdp(book, "engine.", "engine.ulysses_sequence_parallel_size")
    else:
        _read_fsdp(book, "model.fsdp_config.", "ulysses_sequence_parallel_size")
