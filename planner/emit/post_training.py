"""Plan -> verl, OpenRLHF and NeMo-RL: hydra's overrides, a command, and a YAML over the trainer's own.

Keys and words are in `trainers.yaml`; here is how each generates completions, and how it is started.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from planner import vocabulary as words
from planner.emit.common import DEFAULTS, EmitOptions, as_comment, node_layout, refuse, script_duties
from planner.emit.launchers import launch_script
from planner.emit.trainers import Settings, Trainer, nested, settings_of, task_of
from planner.emit.trainers import trainer_of as trainer
from planner.types.plan import Plan


def _is_generating(plan: Plan) -> bool:
    return task_of(plan) in words.GENERATING


def _refuse_late_generation(plan: Plan, own: Trainer) -> None:
    if plan.workload.get("steps_off"):
        raise refuse(plan, own.form, f"with --steps-off {plan.workload['steps_off']}", "plan with --steps-off 0")


def _refuse_partial_rounds(plan: Plan, own: Trainer) -> None:
    """Refuse optimizer steps that take a part of a prompt's completions."""
    generations = plan.workload["generations"]
    if plan.configuration.global_batch_size % generations:
        batch = f"with {plan.configuration.global_batch_size} samples an optimizer step"
        raise refuse(plan, own.form, batch, f"choose a multiple of {generations}, the completions of a prompt")


def _commented(plan: Plan, format: str, options: EmitOptions, name: str) -> str:
    duties = as_comment(script_duties(plan, format, options))
    strategy, ranks = plan.configuration.strategy, plan.configuration.world_size
    return f"#!/usr/bin/env bash\n# {strategy} on {ranks} ranks: bash {name} ARGUMENTS\n{duties}set -euo pipefail\n"


# verl.


def verl(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`verl.sh`: verl's trainer with its overrides.

    Raises:
        ContradictoryRequest: verl has no form of this plan.
    """
    if _is_generating(plan):
        return {"verl.sh": _verl_rounds(plan, options)}
    own = trainer("verl-sft")
    settings = settings_of(plan, own, options)
    nodes, per_node = node_layout(plan)
    settings |= {
        "engine.offload_policy": plan.configuration.offload == "all",
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": per_node,
    }
    arguments = f" -m verl.trainer.sft_trainer{_overrides(settings)}"
    duties = script_duties(plan, "verl", options)
    return {"verl.sh": launch_script(plan, "verl.sh", duties, arguments=arguments)}


def _overrides(settings: Settings) -> str:
    """Return settings as hydra's overrides, one a line."""
    return "".join(f" \\\n    {shlex.quote(f'{key}={_hydra(value)}')}" for key, value in settings.items())


def _hydra(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value)


def _verl_rounds(plan: Plan, options: EmitOptions) -> str:
    own, workload, configuration = trainer("verl"), plan.workload, plan.configuration
    settings = settings_of(plan, own, options)
    _refuse_late_generation(plan, own)
    _refuse_partial_rounds(plan, own)
    if workload["rollout"] != "colocate":
        raise refuse(plan, own.form, f"with rollout {workload['rollout']}", "plan with --rollout colocate")
    nodes, per_node = node_layout(plan)
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    micro = configuration.micro_batch_size
    uses_reference = workload["beta"] > 0
    settings |= {
        "data.train_batch_size": workload["prompts_per_step"],
        "data.max_prompt_length": workload["prompt_length"],
        "data.max_response_length": workload["completion_max"],
        f"{actor}ppo_mini_batch_size": configuration.global_batch_size // workload["generations"],
        f"{actor}ppo_epochs": workload["num_iterations"],
        f"{actor}fsdp_config.offload_policy": configuration.offload == "all",
        f"{actor}use_kl_loss": uses_reference,
        f"{actor}kl_loss_coef": workload["beta"],
        f"{rollout}n": workload["generations"],
        f"{rollout}tensor_model_parallel_size": workload["rollout_tp"],
        f"{rollout}gpu_memory_utilization": workload["rollout_memory"],
        f"{rollout}free_cache_engine": workload["rollout_sleep"],
        f"{rollout}log_prob_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": per_node,
    }
    if task_of(plan) == "ppo":
        settings |= {
            "critic.model.path": plan.model.get("name"),
            "critic.ppo_micro_batch_size_per_gpu": micro,
            "critic.model.enable_gradient_checkpointing": configuration.activation_checkpointing == "full",
        }
    head = _commented(plan, "verl", options, "verl.sh")
    return f'{head}\nexec python3 -m verl.trainer.main_ppo{_overrides(settings)} "$@"\n'


# OpenRLHF.


_PROGRAMS: Mapping[str, str] = {"causal-lm": "train_sft", "sft": "train_sft", "dpo": "train_dpo", "reward": "train_rm"}
_IN_A_ROUND = {
    "model.model_name_or_path": "actor.model_name_or_path",
    "model.gradient_checkpointing_enable": "actor.gradient_checkpointing_enable",
    "adam.lr": "actor.adam.lr",
    "adam.weight_decay": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "optim": "actor.optim",
}
"""Flags of the trainers of samples, and those of the actor's update."""


def openrlhf(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`openrlhf.sh`: one of OpenRLHF's programs with its flags.

    Raises:
        ContradictoryRequest: OpenRLHF has no form of this plan.
    """
    own, configuration = trainer("openrlhf"), plan.configuration
    settings = settings_of(plan, own, options)
    if configuration.gradient_compression != "none":
        compression = f"with gradient compression {configuration.gradient_compression}"
        raise refuse(plan, own.form, compression, "plan with --gradient-compression none")
    if task_of(plan) == "reward" and (plan.workload.get("loss") or "plain") == "fused":
        raise refuse(plan, own.form, "of task reward with loss fused", "plan with --loss plain")
    settings["ds.zero_stage"] = configuration.zero_stage
    settings["ds.adam_offload"] = configuration.offload == "optimizer"
    if _is_generating(plan):
        settings |= _openrlhf_rounds(plan, own)
        settings = {_IN_A_ROUND.get(key, key): value for key, value in settings.items()}
        head = _commented(plan, "openrlhf", options, "openrlhf.sh")
        text = f'{head}\nexec python3 -m openrlhf.cli.train_ppo_ray{_flags(settings)} "$@"\n'
        return {"openrlhf.sh": text}
    arguments = f" -m openrlhf.cli.{_PROGRAMS[task_of(plan)]}{_flags(settings)}"
    duties = script_duties(plan, "openrlhf", options)
    return {"openrlhf.sh": launch_script(plan, "openrlhf.sh", duties, arguments=arguments)}


def _flags(settings: Settings) -> str:
    """Return settings as flags, one a line; those that are off are left out."""
    lines = []
    for key, value in settings.items():
        if isinstance(value, list):
            value = " ".join(map(str, value))
        if value is not False:
            lines.append(f" \\\n    --{key}" + ("" if value is True else f" {value}"))
    return "".join(lines)


def _openrlhf_rounds(plan: Plan, own: Trainer) -> Settings:
    workload = plan.workload
    if workload["rollout"] == "hf":
        raise refuse(plan, own.form, "with rollout hf", "plan with --rollout colocate or server")
    nodes, per_node = node_layout(plan)
    is_beside = workload["rollout"] == "colocate"
    generating = plan.configuration.world_size if is_beside else workload["rollout_gpus"]
    settings: Settings = {
        "data.max_len": workload["prompt_length"] + workload["completion_max"],
        "rollout.max_new_tokens": workload["completion_max"],
        "rollout.batch_size": workload["prompts_per_step"],
        "rollout.n_samples_per_prompt": workload["generations"],
        "rollout.micro_batch_size": plan.configuration.micro_batch_size,
        "train.max_epochs": workload["num_iterations"],
        "algo.kl.init_coef": workload["beta"],
        "vllm.num_engines": generating // workload["rollout_tp"],
        "vllm.tensor_parallel_size": workload["rollout_tp"],
        "vllm.gpu_memory_utilization": workload["rollout_memory"],
        "vllm.enable_sleep": is_beside and workload["rollout_sleep"],
        "train.colocate_all": is_beside,
        "train.colocate_actor_ref": not is_beside,
    }
    for role in ("actor", "ref", "reward", *(("critic",) if task_of(plan) == "ppo" else ())):
        settings |= {f"{role}.num_nodes": nodes, f"{role}.num_gpus_per_node": per_node}
    if workload.get("steps_off"):
        settings |= {"train.async_enable": True, "train.async_queue_size": workload["steps_off"]}
    return settings


# NeMo-RL.


_DEFAULTS: Mapping[str, str] = {
    "causal-lm": "sft",
    "sft": "sft",
    "dpo": "dpo",
    "reward": "rm",
    "grpo": "grpo_math_1B",
}
"""Configs of the trainer's own that a task's is laid over: `examples/configs/`."""


def nemo_rl(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`nemo_rl.yaml` over NeMo-RL's own config, and `nemo_rl.sh`, for a checkout that NEMO_RL names.

    Raises:
        ContradictoryRequest: NeMo-RL has no form of this plan.
    """
    own, configuration, task = trainer("nemo-rl"), plan.configuration, task_of(plan)
    settings = settings_of(plan, own, options)
    nodes, per_node = node_layout(plan)
    section = "policy.dtensor_cfg."
    settings[f"{section}cpu_offload"] = configuration.offload == "all"
    if f"{section}lora_cfg.target_modules" in settings:
        settings[f"{section}lora_cfg.match_all_linear"] = False
    if f"{section}lora_cfg.enabled" in settings:
        if task == "reward":
            raise refuse(plan, own.form, "of task reward with method lora", "plan with --method full")
        settings |= {f"{section}lora_cfg.use_triton": False} if configuration.tp > 1 else {}
    elif task != "reward":  # whose config has no such section
        settings[f"{section}lora_cfg.enabled"] = False
    recipe = _DEFAULTS[task]
    if task == "grpo":
        settings |= _nemo_rounds(plan, own)
    else:
        settings[f"{recipe}.max_num_epochs"] = 1
    generating_nodes = -(-plan.workload.get("rollout_gpus", 0) // per_node) if task == "grpo" else 0
    settings |= {"cluster.gpus_per_node": per_node, "cluster.num_nodes": nodes + generating_nodes}
    head = {"defaults": f"${{oc.env:NEMO_RL}}/examples/configs/{recipe}.yaml"}
    body = yaml.safe_dump(head | nested(settings), sort_keys=False)
    program = f"run_{recipe.partition('_')[0]}.py"
    script = f"""{_commented(plan, "nemo-rl", options, "nemo_rl.sh")}
: "${{NEMO_RL:?set NEMO_RL to a checkout of NeMo-RL}}"
export NEMO_RL
exec uv run --project "$NEMO_RL" "$NEMO_RL/examples/{program}" --config nemo_rl.yaml "$@"
"""
    return {"nemo_rl.yaml": as_comment(script_duties(plan, "nemo-rl", options)) + body, "nemo_rl.sh": script}


def _nemo_rounds(plan: Plan, own: Trainer) -> Settings:
    workload, engine = plan.workload, "policy.generation."
    if workload["rollout"] == "hf":
        raise refuse(plan, own.form, "with rollout hf", "plan with --rollout colocate or server")
    if workload["num_iterations"] > 1:
        iterations = f"with {workload['num_iterations']} iterations over a round"
        raise refuse(plan, own.form, iterations, "plan with --num-iterations 1")
    if workload["rollout"] == "colocate" and not workload["rollout_sleep"]:
        raise refuse(plan, own.form, "with an engine that stays awake", "it sleeps there; plan with --rollout-sleep")
    nodes, per_node = node_layout(plan)
    settings: Settings = {
        "grpo.num_prompts_per_step": workload["prompts_per_step"],
        "grpo.num_generations_per_prompt": workload["generations"],
        "policy.logprob_batch_size": plan.configuration.micro_batch_size,
        "loss_fn.reference_policy_kl_penalty": workload["beta"],
        f"{engine}backend": "vllm",
        f"{engine}max_new_tokens": workload["completion_max"],
        f"{engine}vllm_cfg.tensor_parallel_size": workload["rollout_tp"],
        f"{engine}vllm_cfg.gpu_memory_utilization": workload["rollout_memory"],
        f"{engine}vllm_cfg.max_model_len": plan.configuration.sequence_length,
        f"{engine}colocated.enabled": workload["rollout"] == "colocate",
    }
    if workload["rollout"] == "server":
        share = workload["rollout_gpus"]
        if nodes == 1 or share % per_node:
            raise refuse(plan, own.form, f"with {share} GPUs that generate", "give it whole nodes: --rollout-gpus")
        settings |= {
            f"{engine}colocated.resources.gpus_per_node": per_node,
            f"{engine}colocated.resources.num_nodes": share // per_node,
        }
    if workload.get("steps_off"):
        settings |= {
            "grpo.async_grpo.enabled": True,
            "grpo.async_grpo.max_trajectory_age_steps": workload["steps_off"],
            f"{engine}vllm_cfg.async_engine": True,
        }
    return settings
