"""Plan -> nanotron's YAML, as `run_train.py --config-file` reads it.

Source of the names: huggingface/nanotron at 2411b022 (src/nanotron/config/config.py, config/models_config.py,
config/parallelism_config.py, parallel/context.py).
"""

from __future__ import annotations

import yaml

from planner.cost.code_bases import code_base
from planner.emit.common import (
    DEFAULTS,
    Abilities,
    EmitOptions,
    as_comment,
    every_block,
    facts_of,
    refuse,
    require,
    script_duties,
)
from planner.emit.launchers import launch_script
from planner.models.facts import ModelFacts
from planner.types.plan import Plan

_FORM = "a nanotron config"
_FILE = "nanotron.yaml"
_CODE = code_base("nanotron")
_ABILITIES = Abilities(
    strategies=frozenset({"single", "ddp", "zero1"}),
    instead="nanotron shards the optimizer at most; plan zero1 or ddp",
    precisions=frozenset({"bf16"}),
    optimizers=frozenset({"adamw", "adamw-fused"}),
    attentions=frozenset({"sdpa", "flash"}),
    schedules=frozenset(_CODE.schedules),
    offloads=frozenset(_CODE.offloads),
    checkpointings=frozenset(_CODE.checkpointings),
)
_ENGINES = {"gpipe": "afab", "1f1b": "1f1b"}
# Steps and the schedule of the learning rate are the user's; nanotron has no config without them.
_STEPS = 100


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`nanotron.yaml` and `nanotron.sh`, around `run_train.py` of a checkout that NANOTRON names.

    Raises:
        ContradictoryRequest: nanotron has no form of this plan.
    """
    duties = script_duties(plan, "nanotron", options)
    body = yaml.safe_dump(nanotron_config(plan, options), sort_keys=False)
    head = """export CUDA_DEVICE_MAX_CONNECTIONS=1
: "${NANOTRON:?set NANOTRON to a checkout of nanotron}"
"""
    command = f' "$NANOTRON/run_train.py" --config-file {_FILE}'
    return {
        _FILE: as_comment(duties) + body,
        "nanotron.sh": launch_script(plan, "nanotron.sh", duties, head=head, arguments=command),
    }


def nanotron_config(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, object]:
    """Return the mapping of the YAML file.

    Raises:
        ContradictoryRequest: nanotron has no form of this plan.
    """
    require(plan, _FORM, _ABILITIES)
    facts, configuration = facts_of(plan, _FORM), plan.configuration
    _refuse_what_nanotron_lacks(plan, facts)
    return {
        "general": {"project": "dsplan", "run": f"{configuration.strategy}_%date_%jobid", "seed": 42},
        "parallelism": _parallelism(plan),
        "model": {
            "dtype": "bfloat16",
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(plan, facts),
        },
        "tokenizer": {"tokenizer_name_or_path": facts.name},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"iteration_step_info_interval": 1},
        "tokens": {
            "sequence_length": configuration.sequence_length,
            "train_steps": _STEPS,
            "micro_batch_size": configuration.micro_batch_size,
            "batch_accumulation_per_replica": configuration.gradient_accumulation_steps,
        },
        "optimizer": _optimizer(plan, options),
        # Without a dataset nanotron trains on tokens it makes up.
        "data_stages": [{"name": "stable", "start_training_step": 1, "data": {"dataset": None, "seed": 42}}],
    }


def _refuse_what_nanotron_lacks(plan: Plan, facts: ModelFacts) -> None:
    configuration = plan.configuration
    if facts.num_experts or configuration.ep > 1:
        # Its ranks are tp x cp x dp x pp and its groups ep times as many (parallel/context.py), so ep cannot start.
        raise refuse(plan, _FORM, f"of the experts of {facts.name}", "emit it as megatron or torchtitan")
    windowed = 0 < facts.sliding_window < configuration.sequence_length
    wide = facts.head_dim * facts.num_heads != facts.hidden_size
    if facts.model_type not in ("llama", "mistral", "qwen2") or windowed or wide or facts.mlp_bias:
        raise refuse(plan, _FORM, f"of {facts.name}", "nanotron builds llama, mistral and qwen2; emit it as megatron")
    if facts.num_kv_heads < configuration.tp:
        heads = f"with tp {configuration.tp} over {facts.num_kv_heads} key-value heads"
        raise refuse(plan, _FORM, heads, "nanotron copies no heads; plan with a smaller --tp")
    if configuration.activation_checkpointing == "full" and configuration.checkpoint_every > 1:
        raise refuse(
            plan, _FORM, f"with {every_block(plan)}", "nanotron recomputes all; plan with --checkpoint-every 1"
        )


def _parallelism(plan: Plan) -> dict[str, object]:
    configuration = plan.configuration
    sequence = configuration.sequence_parallel and configuration.tp > 1
    return {
        "dp": configuration.dims.data_parallel,
        "pp": configuration.pp,
        "tp": configuration.tp,
        "context_parallel_size": configuration.cp,
        "expert_parallel_size": 1,
        "pp_engine": _ENGINES.get(configuration.pp_schedule, "1f1b"),
        "tp_mode": "REDUCE_SCATTER" if sequence else "ALL_REDUCE",
        "tp_linear_async_communication": sequence,
        "recompute_layer": configuration.activation_checkpointing == "full",
    }


def _model(plan: Plan, facts: ModelFacts) -> dict[str, object]:
    """LlamaConfig, or Qwen2Config where there are biases or a split sequence, which only that model has."""
    configuration = plan.configuration
    fields: dict[str, object] = {
        "hidden_act": facts.activation,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "max_position_embeddings": max(facts.max_position_embeddings, configuration.sequence_length),
        "num_attention_heads": facts.num_heads,
        "num_hidden_layers": facts.num_layers,
        "num_key_value_heads": facts.num_kv_heads,
        "attention_bias": facts.qkv_bias,
        "tie_word_embeddings": facts.tie_word_embeddings,
        "vocab_size": facts.vocab_size,
    }
    if configuration.cp > 1:
        ring: dict[str, object] = {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 1}
        return {"is_qwen2_config": True, **fields, **ring}
    family = "is_qwen2_config" if facts.qkv_bias else "is_llama_config"
    return {family: True, **fields, "_attn_implementation": "flash_attention_2"}


def _optimizer(plan: Plan, options: EmitOptions) -> dict[str, object]:
    configuration = plan.configuration
    return {
        "zero_stage": configuration.zero_stage,
        "weight_decay": options.weight_decay,
        "clip_grad": options.gradient_clipping,
        "accumulate_grad_in_fp32": True,
        "learning_rate_scheduler": {
            "learning_rate": options.learning_rate,
            "lr_warmup_steps": 2,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": options.learning_rate / 10,
        },
        "optimizer_factory": {
            "name": "adamW",
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "torch_adam_is_fused": configuration.optimizer == "adamw-fused",
        },
    }
