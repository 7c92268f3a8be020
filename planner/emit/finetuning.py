"""Plan -> axolotl, LLaMA-Factory, ms-swift, TRL and torchtune: a YAML of each, and a script that starts it.

Keys and words are in `trainers.yaml`; here is how each spreads states and how it is started.
"""

from __future__ import annotations

import yaml

from planner import vocabulary as words
from planner.emit.accelerate import accelerate_config
from planner.emit.common import (
    DEFAULTS,
    EmitOptions,
    as_comment,
    compute_dtype,
    is_zero,
    loaded_as,
    node_layout,
    refuse,
    script_duties,
)
from planner.emit.deepspeed import CONFIG_NAME, as_json, config_without_optimizer
from planner.emit.launchers import launch_command, launch_script
from planner.emit.trainers import Settings, Trainer, nested, settings_of, target_modules, task_of, torchtune_models
from planner.emit.trainers import trainer_of as trainer
from planner.types.plan import Plan

_ACCELERATE = "accelerate.yaml"


def config_text(plan: Plan, format: str, settings: Settings, options: EmitOptions) -> str:
    """Return a YAML file with the script's duties at its head."""
    body = yaml.safe_dump(nested(settings), sort_keys=False)
    return as_comment(script_duties(plan, format, options)) + body


def _script(plan: Plan, name: str, command: str) -> str:
    """Return a script of one command, behind the variables that several nodes need."""
    return f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash {name} ARGUMENTS
set -euo pipefail
{command} "$@"
"""


_NODE_VARIABLES = """
# Run this on every node, with NODE_RANK counting them from 0 and MASTER_ADDR the address of the first.
: "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"
"""


def _is_fsdp(plan: Plan) -> bool:
    return plan.configuration.strategy in words.FSDP_STRATEGIES


def _deepspeed_file(plan: Plan, form: str, options: EmitOptions) -> dict[str, str]:
    """Return the DeepSpeed config beside a trainer's, none where the plan is no ZeRO."""
    if not is_zero(plan):
        return {}
    if plan.configuration.precision == "fp32" and plan.configuration.offload == "nvme":
        raise refuse(plan, form, "in fp32 with offload nvme", "plan with --precision bf16")
    return {CONFIG_NAME: as_json(config_without_optimizer(plan, form, options))}


def _with_fsdps_recomputation(plan: Plan, settings: Settings, off: Settings) -> Settings:
    """Return settings where FSDP recomputes inside its own wrapping, beside which a trainer's own would be a second."""
    if not _is_fsdp(plan):
        return settings
    kept = {key: value for key, value in settings.items() if key != "gradient_checkpointing_kwargs"}
    return kept | off


# axolotl.


def axolotl(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`axolotl.yaml` and `axolotl.sh`, and `deepspeed.json` beside them for ZeRO.

    Raises:
        ContradictoryRequest: axolotl has no form of this plan.
    """
    own = trainer("axolotl")
    settings = settings_of(plan, own, options)
    deepspeed = _deepspeed_file(plan, own.form, options)
    if plan.configuration.optimizer == "muon" and deepspeed:
        raise refuse(plan, own.form, "with optimizer muon", "axolotl has muon for replicas and FSDP")
    if plan.configuration.optimizer == "muon" and (plan.workload.get("method") or "full") != "full":
        raise refuse(plan, own.form, "with optimizer muon beside adapters", "plan with --optimizer adamw")
    tp_size = settings.pop("tensor_parallel_size")
    settings = _with_fsdps_recomputation(plan, settings, {"gradient_checkpointing": False})
    if deepspeed:
        settings["deepspeed"] = CONFIG_NAME
    elif _is_fsdp(plan):
        settings |= _axolotl_fsdp(plan, own, tp_size)
    duties = script_duties(plan, "axolotl", options)
    files = {
        "axolotl.yaml": config_text(plan, "axolotl", settings, options),
        "axolotl.sh": launch_script(plan, "axolotl.sh", duties, arguments=" -m axolotl.cli.train axolotl.yaml"),
    }
    return files | deepspeed


def _axolotl_fsdp(plan: Plan, own: Trainer, tp_size: int) -> Settings:
    configuration = plan.configuration
    block = plan.model.get("block_class", "")
    if configuration.optimizer == "adamw-8bit-paged":
        raise refuse(plan, own.form, "with optimizer adamw-8bit-paged", "plan with --optimizer adamw-8bit")
    settings: Settings = {
        # bitsandbytes' does not run over FSDP2 (check_fsdp2_w_8bit_optimizer); torchao's does.
        **({"optimizer": "adamw_torch_8bit"} if configuration.optimizer == "adamw-8bit" else {}),
        "fsdp_version": 2,
        "fsdp_config": {
            "offload_params": configuration.offload == "all",
            "cpu_ram_efficient_loading": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            **({"transformer_layer_cls_to_wrap": block} if block else {}),
            "state_dict_type": "SHARDED_STATE_DICT",
            "reshard_after_forward": configuration.strategy != "fsdp-grad-op",
            "activation_checkpointing": configuration.activation_checkpointing == "full",
        },
    }
    is_quantised = plan.workload.get("method") == "qlora" or plan.workload.get("load_dtype") == "int8"
    if is_quantised and task_of(plan) in ("dpo", "kto", "orpo"):  # check_fsdp2_base_model_quant_rl
        raise refuse(plan, own.form, f"of quantised weights for {task_of(plan)}", "plan with --strategy zero2")
    if configuration.dp_replicate > 1 or tp_size > 1:
        if configuration.strategy == "fsdp-grad-op":
            raise refuse(plan, own.form, f"with tp {tp_size}", "plan with --strategy fsdp")
        if configuration.dp_shard == 1:
            raise refuse(plan, own.form, f"with tp {tp_size} over all its ranks", "plan with a smaller --tp")
        settings |= {"dp_replicate_size": configuration.dp_replicate, "dp_shard_size": configuration.dp_shard}
        settings |= {"tensor_parallel_size": tp_size} if tp_size > 1 else {}
    return settings


# LLaMA-Factory.


def llama_factory(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`llama_factory.yaml` and `llama_factory.sh`, with `deepspeed.json` for ZeRO and `accelerate.yaml` for FSDP.

    Raises:
        ContradictoryRequest: LLaMA-Factory has no form of this plan.
    """
    own = trainer("llama-factory")
    settings = settings_of(plan, own, options)
    deepspeed = _deepspeed_file(plan, own.form, options)
    settings = _with_fsdps_recomputation(plan, settings, {"disable_gradient_checkpointing": True})
    if plan.configuration.optimizer == "muon" and deepspeed:
        raise refuse(plan, own.form, "with optimizer muon", "plan with --optimizer adamw")
    if deepspeed:
        settings["deepspeed"] = CONFIG_NAME
    files = {"llama_factory.yaml": config_text(plan, "llama-factory", settings, options)}
    arguments = " -m llamafactory.launcher llama_factory.yaml"
    if _is_fsdp(plan):
        script = _script(plan, "llama_factory.sh", f"{_accelerate_launch(plan)}{arguments}")
        files |= {"llama_factory.sh": script, _ACCELERATE: _accelerate_text(plan, options)}
    else:
        duties = script_duties(plan, "llama-factory", options)
        files["llama_factory.sh"] = launch_script(plan, "llama_factory.sh", duties, arguments=arguments)
    return files | deepspeed


def _accelerate_text(plan: Plan, options: EmitOptions) -> str:
    return yaml.safe_dump(accelerate_config(plan, options), sort_keys=False)


def _accelerate_launch(plan: Plan) -> str:
    """Return the lines up to the program that accelerate starts."""
    if node_layout(plan)[0] == 1:
        return f"\nexec accelerate launch --config_file {_ACCELERATE}"
    meeting = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "${MASTER_PORT:-29500}"'
    return f"{_NODE_VARIABLES}\nexec accelerate launch --config_file {_ACCELERATE} {meeting}"


# ms-swift.


def ms_swift(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`ms_swift.yaml` and `ms_swift.sh`, and `deepspeed.json` beside them for ZeRO.

    Raises:
        ContradictoryRequest: ms-swift has no form of this plan.
    """
    own = trainer("ms-swift")
    settings = settings_of(plan, own, options)
    deepspeed = _deepspeed_file(plan, own.form, options)
    settings = _with_fsdps_recomputation(plan, settings, {"gradient_checkpointing": False})
    if loaded_as(plan) == "nf4":  # the scales are quantised too unless told otherwise
        settings |= dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"), compute_dtype(plan))
    if deepspeed:
        settings["deepspeed"] = CONFIG_NAME
    elif _is_fsdp(plan):
        settings["fsdp"] = _swift_fsdp(plan)
    nodes, per_node = node_layout(plan)
    several = f"{_NODE_VARIABLES}export NNODES={nodes} NODE_RANK MASTER_ADDR\n" if nodes > 1 else ""
    command = "rlhf" if "rlhf_type" in settings else "sft"
    script = f"{several}export NPROC_PER_NODE={per_node}\n\nexec swift {command} ms_swift.yaml"
    files = {
        "ms_swift.yaml": config_text(plan, "ms-swift", settings, options),
        "ms_swift.sh": _script(plan, "ms_swift.sh", script),
    }
    return files | deepspeed


def _swift_fsdp(plan: Plan) -> Settings:
    """Return the form of `swift/config/fsdp2.json`, which may stand in the config itself."""
    configuration = plan.configuration
    keeps = configuration.strategy == "fsdp-grad-op"
    offload = " offload" if configuration.offload == "all" else ""
    return {
        "fsdp": f"{'shard_grad_op' if keeps else 'full_shard'} auto_wrap{offload}",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": not keeps,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": configuration.activation_checkpointing == "full",
        },
    }


# TRL.


_TILED: tuple[words.Task, ...] = ("dpo", "kto", "grpo")
"""Tasks whose log-probabilities TRL always takes in tiles, or fused."""


def trl(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`trl.yaml`, `accelerate.yaml` and `trl.sh`, and `deepspeed.json` beside them for ZeRO.

    Raises:
        ContradictoryRequest: TRL has no form of this plan.
    """
    own, task = trainer("trl"), task_of(plan)
    settings = settings_of(plan, own, options)
    loss = plan.workload.get("loss") or "plain"
    if (task in _TILED and loss == "plain") or (task == "reward" and loss != "plain"):
        remedy = f"plan with --loss {'tiled or fused' if task in _TILED else 'plain'}"
        raise refuse(plan, own.form, f"of task {task} with loss {loss}", remedy)
    if loaded_as(plan) is not None:
        settings["dtype"] = compute_dtype(plan)
    if loaded_as(plan) == "nf4":  # its products are of `dtype`; codes of whole numbers would be on every rank
        settings |= {"use_bnb_nested_quant": True, "bnb_4bit_quant_storage": compute_dtype(plan)}
    if task == "grpo":
        settings.pop("max_length")
        settings |= _trl_rounds(plan, own)
    elif loss != "fused" and task in ("causal-lm", "sft"):
        settings["loss_type"] = "chunked_nll" if loss == "tiled" else "nll"
    settings = _with_fsdps_recomputation(plan, settings, {"gradient_checkpointing": False})
    deepspeed = _deepspeed_file(plan, own.form, options)
    command = {"causal-lm": "sft"}.get(task, task)
    launch = f"\nexec trl {command} --config trl.yaml --accelerate_config {_ACCELERATE}"
    if task == "grpo":  # `trl grpo` checks a round against one process before it starts the others
        launch = f"{_accelerate_launch(plan)} -m trl.scripts.grpo --config trl.yaml"
    elif node_layout(plan)[0] > 1:
        meeting = ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port'
        launch = f'{_NODE_VARIABLES}{launch}{meeting} "${{MASTER_PORT:-29500}}"'
    files = {
        "trl.yaml": config_text(plan, "trl", settings, options),
        "trl.sh": _script(plan, "trl.sh", launch),
        _ACCELERATE: _accelerate_text(plan, options),
    }
    return files | deepspeed


def _trl_rounds(plan: Plan, own: Trainer) -> Settings:
    """Return how completions are generated and trained on.

    A round is `steps_per_generation` micro-batches of every rank (`GRPOConfig.__post_init__`).
    """
    workload, configuration = plan.workload, plan.configuration
    per_step = configuration.micro_batch_size * configuration.dims.data_parallel
    samples = workload["prompts_per_step"] * workload["generations"]
    if workload["generations"] == 1:
        raise refuse(plan, own.form, "with 1 completion a prompt", "plan with --generations 2 or more")
    if samples % per_step:
        raise refuse(plan, own.form, f"with {samples} completions a round", f"choose a multiple of {per_step}")
    if workload.get("steps_off"):
        raise refuse(plan, own.form, f"with --steps-off {workload['steps_off']}", "plan with --steps-off 0")
    settings: Settings = {
        "max_completion_length": workload["completion_max"],
        "num_generations": workload["generations"],
        "steps_per_generation": samples // per_step,
        "num_iterations": workload["num_iterations"],
        "beta": workload["beta"],
        "use_vllm": workload["rollout"] != "hf",
    }
    if workload["rollout"] == "colocate":
        settings |= {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": workload["rollout_memory"],
            "vllm_tensor_parallel_size": workload["rollout_tp"],
            "vllm_enable_sleep_mode": workload["rollout_sleep"],
        }
    elif workload["rollout"] == "server":
        settings["vllm_mode"] = "server"
    return settings


# torchtune.


_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Layers as transformers and torchtune call them."""


def torchtune(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`torchtune.yaml` and `torchtune.sh`.

    Raises:
        ContradictoryRequest: torchtune has no form of this plan.
    """
    own = trainer("torchtune")
    settings = settings_of(plan, own, options)
    configuration, method = plan.configuration, plan.workload.get("method") or "full"
    row = torchtune_models().get(str(plan.model.get("name")))
    if row is None:
        raise refuse(plan, own.form, f"of {plan.model.get('name')}", f"choose one of {', '.join(torchtune_models())}")
    settings |= _torchtune_model(plan, own, dict(row), method)
    if _is_fsdp(plan):
        settings["fsdp_cpu_offload"] = configuration.offload == "all"
        if configuration.strategy == "hsdp":
            settings |= {
                "data_parallel_replicate_dim": configuration.dp_replicate,
                "data_parallel_shard_dim": configuration.dp_shard,
            }
    if method != "full":
        settings["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 100,
        }
    settings.setdefault("compile", False)
    kind = "full" if method == "full" else "lora"
    devices = "single_device" if configuration.strategy == "single" else "distributed"
    launch = "tune run" if devices == "single_device" else launch_command(plan).replace("torchrun", "tune run", 1)
    command = f"\nexec {launch} {kind}_finetune_{devices} --config torchtune.yaml"
    return {
        "torchtune.yaml": config_text(plan, "torchtune", settings, options),
        "torchtune.sh": _script(plan, "torchtune.sh", command),
    }


def _torchtune_model(plan: Plan, own: Trainer, row: Settings, method: str) -> Settings:
    """Return the builder of a model, with its adapters, tokenizer and checkpointer."""
    folder = f"MODELS/{str(plan.model['name']).rpartition('/')[2]}"
    family, _, name = str(row["builder"]).partition(".")
    settings: Settings = {"model._component_": f"torchtune.models.{family}.{name}"}
    if method != "full":
        if method == "qlora" and not row["qlora"]:
            raise refuse(plan, own.form, f"of {plan.model['name']} with method qlora", "plan with --method lora")
        prefix = "qlora" if method == "qlora" else "lora"
        settings["model._component_"] = f"torchtune.models.{family}.{prefix}_{name}"
        settings |= _torchtune_targets(plan, own)
    settings["tokenizer._component_"] = f"torchtune.models.{row['tokenizer']}"
    settings |= {f"tokenizer.{key}": f"{folder}/{file}" for key, file in row["files"].items()}
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": folder,
        "checkpoint_files": ["MODEL.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "${output_dir}",
        "model_type": row["model_type"],
    }
    return settings | {f"checkpointer.{key}": value for key, value in checkpointer.items()}


def _torchtune_targets(plan: Plan, own: Trainer) -> Settings:
    """Return the flags of torchtune's builders of adapters: attention by names, the MLP whole."""
    modules = target_modules(plan, own.form)
    of_mlp = [name for name in modules if name in _MLP]
    attention = [name for name in modules if name in _ATTENTION]
    if of_mlp not in ([], list(_MLP)) or len(attention) + len(of_mlp) < len(modules) or not attention:
        names = ",".join(modules)
        raise refuse(plan, own.form, f"with adapters beside {names}", "plan with --lora-targets all-linear")
    return {
        "model.lora_attn_modules": [_ATTENTION[name] for name in attention],
        "model.apply_lora_to_mlp": bool(of_mlp),
        "model.apply_lora_to_output": False,
    }
