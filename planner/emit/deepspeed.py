"""Plan -> DeepSpeed JSON. Every number is explicit, none `auto`: the file works without HF Trainer.

The plan's optimizer becomes torch's own implementation where there is one (`torch_adam`): the plan's memory was counted
for that one, and it needs no compiler. Two cases need DeepSpeed's compiled kernels: optimizer offload on a GPU machine
(`DeepSpeedCPUAdam`, which the plan's time was counted for), and Lion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from planner.cost.zero_bucket_sizes import zero_buckets
from planner.emit.common import (
    DEFAULTS,
    EmitOptions,
    is_zero,
    model_number,
    node_layout,
    on_cpu,
    refuse,
    require_data_parallel_only,
)
from planner.types.plan import Plan

# Plan -> DeepSpeed's launcher, as a script that takes the training script and its arguments.


_ONE_NODE = """
# A free port where none is named: the launcher's own, 29500, may be another run's.
free='import socket; found = socket.socket(); found.bind(("", 0)); print(found.getsockname()[1])'
port=${MASTER_PORT:-$(python -c "$free")}
"""
_SEVERAL_NODES = """
: "${HOSTFILE:?set HOSTFILE to a file with a line per node: name slots=GPUS}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node of HOSTFILE}"
nodes=(--hostfile="$HOSTFILE" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
# Without ssh between nodes: run this on every node, with NODE_RANK counting the lines of HOSTFILE from 0.
if [ -n "${NODE_RANK:-}" ]; then nodes+=(--no_ssh --node_rank="$NODE_RANK"); fi
"""


def launch_script(plan: Plan) -> dict[str, str]:
    """`deepspeed.sh`: `bash deepspeed.sh train.py --deepspeed_config deepspeed.json`.

    Raises:
        ContradictoryRequest: the plan's ranks do not fill whole nodes.
    """
    nodes, per_node = node_layout(plan)
    ranks = f"--num_gpus={per_node}"
    where = f'--num_nodes={nodes} {ranks} "${{nodes[@]}}"' if nodes > 1 else f'{ranks} --master_port="$port"'
    text = f"""#!/usr/bin/env bash
# {plan.configuration.strategy} on {plan.configuration.world_size} ranks: bash deepspeed.sh train.py ARGUMENTS
set -euo pipefail
{_SEVERAL_NODES if nodes > 1 else _ONE_NODE}
exec deepspeed {where} "$@"
"""
    return {"deepspeed.sh": text}


CONFIG_NAME = "deepspeed.json"
_FORM = "a DeepSpeed config"


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`deepspeed.json`, and `deepspeed.sh` for DeepSpeed's launcher.

    Raises:
        ContradictoryRequest: DeepSpeed has no form of this plan, or its ranks do not fill whole nodes.
    """
    return {CONFIG_NAME: as_json(deepspeed_config(plan, options)), **launch_script(plan)}


def as_json(config: Mapping[str, object]) -> str:
    """Return a config as the text of a JSON file."""
    return json.dumps(config, indent=2) + "\n"


def deepspeed_config(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, object]:
    """Return the config of a `single`, `ddp` (stage 0) or ZeRO plan as `deepspeed.initialize(config=...)` takes it.

    Raises:
        ContradictoryRequest: the plan is FSDP, uses tp or pp, or asks of a stage what it cannot do.
    """
    _refuse_what_deepspeed_lacks(plan)
    configuration = plan.configuration
    return {
        "train_batch_size": configuration.global_batch_size,
        "train_micro_batch_size_per_gpu": configuration.micro_batch_size,
        "gradient_accumulation_steps": configuration.gradient_accumulation_steps,
        "gradient_clipping": options.gradient_clipping,
        **_precision(plan),
        "zero_optimization": _zero_optimization(plan, options),
        **_optimizer(plan, options),
        **_activation_checkpointing(plan),
        **_communication(plan),
        "wall_clock_breakdown": False,
    }


def config_without_optimizer(plan: Plan, form: str, options: EmitOptions = DEFAULTS) -> dict[str, object]:
    """Return the config for accelerate and HF Trainer, where the script or the Trainer makes the optimizer.

    On GPU machines accelerate itself replaces an offloaded torch AdamW by `DeepSpeedCPUAdam`.

    Raises:
        ContradictoryRequest: as `deepspeed_config`; or bf16 master weights would have to be made by that replacement,
            which keeps fp32 moments.
    """
    if plan.configuration.precision == "bf16-pure" and plan.configuration.offload != "none":
        raise refuse(plan, form, "in bf16-pure with offload", "emit it as deepspeed")
    config = deepspeed_config(plan, options)
    config.pop("optimizer", None)
    if plan.configuration.offload != "none" and on_cpu(plan, options):
        config["zero_force_ds_cpu_optimizer"] = False
    return {**config, "zero_allow_untested_optimizer": True}


def _refuse_what_deepspeed_lacks(plan: Plan) -> None:
    require_data_parallel_only(plan, _FORM)
    configuration = plan.configuration
    if not is_zero(plan):
        if configuration.strategy not in ("single", "ddp"):
            raise refuse(plan, _FORM, "(FSDP)", "emit it as accelerate or huggingface")
        if configuration.precision == "bf16-pure":
            raise refuse(plan, _FORM, "in bf16-pure", "choose ZeRO or emit it as huggingface")
        if configuration.offload != "none":
            raise refuse(plan, _FORM, f"with offload {configuration.offload}", "choose ZeRO")
    elif configuration.dp_replicate > 1:
        # MiCS is gone: "MiCS ZeRO-3 sharding has been removed" (DeepSpeed 0.19, runtime/config.py).
        reason = f"with {configuration.dp_replicate} copies of shards over {configuration.dp_shard} ranks"
        remedy = "DeepSpeed 0.19 shards over all ranks; use backend native, or plan hsdp and emit it as accelerate"
        raise refuse(plan, _FORM, reason, remedy)
    elif configuration.offload in ("all", "nvme") and configuration.zero_stage < 3:
        raise refuse(plan, _FORM, f"with offload {configuration.offload}", "only zero3 can offload parameters")


def _precision(plan: Plan) -> dict[str, object]:
    """Stage 0 runs autocast over fp32 weights like DDP does; ZeRO keeps 16-bit weights and an fp32 master copy."""
    precision = plan.configuration.precision
    if precision == "fp32":
        return {}
    if not is_zero(plan):
        return {"torch_autocast": {"enabled": True, "dtype": "float16" if precision == "fp16" else "bfloat16"}}
    if precision == "fp16":
        scaling = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
        return {"fp16": {"enabled": True, "auto_cast": True, **scaling, "min_loss_scale": 1}}
    if precision == "bf16-pure":
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    return {"bf16": {"enabled": True}}


def _zero_optimization(plan: Plan, options: EmitOptions) -> dict[str, object]:
    stage = plan.configuration.zero_stage
    if stage == 0:
        return {"stage": 0}
    buckets = zero_buckets(
        stage, parameters=model_number(plan, "parameters"), hidden_size=model_number(plan, "hidden_size")
    )
    section: dict[str, object] = {
        "stage": stage,
        "overlap_comm": buckets.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": buckets.reduce,
        "allgather_bucket_size": buckets.allgather,
    }
    if stage == 3:
        section |= {
            "sub_group_size": buckets.sub_group,
            "stage3_prefetch_bucket_size": buckets.prefetch,
            "stage3_param_persistence_threshold": buckets.persistence_threshold,
            "stage3_max_live_parameters": buckets.max_live,
            "stage3_max_reuse_distance": buckets.max_reuse_distance,
            "stage3_gather_16bit_weights_on_model_save": True,
            **_zero_plus(plan),
        }
    return section | _offload(plan, options)


def _zero_plus(plan: Plan) -> dict[str, object]:
    """Return the keys of ZeRO++ that a plan switches on."""
    chosen = plan.configuration
    keys: dict[str, object] = {
        "zero_hpz_partition_size": chosen.hpz_partition_size if chosen.hpz_partition_size > 1 else None,
        "zero_quantized_weights": chosen.quantized_weights or None,
        "zero_quantized_gradients": chosen.quantized_gradients or None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def _offload(plan: Plan, options: EmitOptions) -> dict[str, object]:
    """`optimizer`: states to host memory; `all`: parameters too; `nvme`: both to disk (ZeRO-Infinity)."""
    offload = plan.configuration.offload
    if offload == "none":
        return {}
    target: dict[str, object] = {"device": "cpu", "pin_memory": not on_cpu(plan, options)}
    if offload == "optimizer":
        return {"offload_optimizer": {**target, "ratio": 1.0}}
    if offload == "all":
        return {"offload_optimizer": {**target, "ratio": 1.0}, "offload_param": target}
    target |= {"device": "nvme", "nvme_path": options.nvme_path}
    # Adam swaps four tensors per sub-group: parameter, gradient and two moments.
    optimizer = {**target, "buffer_count": 4, "fast_init": False}
    parameters = {**target, "buffer_count": 5, "buffer_size": _swap_buffer(plan), "max_in_cpu": 1_000_000_000}
    return {"offload_optimizer": optimizer, "offload_param": parameters}


def _swap_buffer(plan: Plan) -> int:
    """Elements of one swap buffer: DeepSpeed's 1e8, or one rank's part of the embedding where that is larger.

    DeepSpeed stops with an assertion when a parameter's partition is larger than a buffer.
    """
    vocabulary = plan.model.get("vocab_size")
    embedding = vocabulary * model_number(plan, "hidden_size") if isinstance(vocabulary, int) else 0
    return max(100_000_000, -(-embedding // plan.configuration.dims.data_parallel))


def _optimizer(plan: Plan, options: EmitOptions) -> dict[str, object]:
    """Return the optimizer section, or the permission to pass an optimizer that DeepSpeed cannot build from JSON."""
    name = plan.configuration.optimizer
    rates: dict[str, object] = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
    if name in ("adamw", "adamw-fused", "adamw-forloop"):
        moments = {"betas": [0.9, 0.999], "eps": 1e-8}
        return {"optimizer": {"type": "AdamW", "params": {**rates, **moments, **_adam_implementation(plan, options)}}}
    untested = {"zero_allow_untested_optimizer": True} if is_zero(plan) else {}
    if name == "lion" and not on_cpu(plan, options):
        return {"optimizer": {"type": "Lion", "params": {**rates, "betas": [0.9, 0.99]}}}
    if name in ("sgd", "adafactor"):
        return {"optimizer": {"type": {"sgd": "SGD", "adafactor": "Adafactor"}[name], "params": rates}, **untested}
    return {**untested, **({} if plan.configuration.offload == "none" else {"zero_force_ds_cpu_optimizer": False})}


def _adam_implementation(plan: Plan, options: EmitOptions) -> dict[str, object]:
    configuration = plan.configuration
    # bf16 master weights on the host are stored by DeepSpeedCPUAdam only.
    compiled = not on_cpu(plan, options) or configuration.precision == "bf16-pure"
    if configuration.offload != "none" and compiled:
        return {}
    variants = {"adamw-fused": {"fused": True}, "adamw-forloop": {"foreach": False}}
    return {"torch_adam": True, **variants.get(configuration.optimizer, {})}


def _communication(plan: Plan) -> dict[str, object]:
    compression = plan.configuration.gradient_compression
    return {"communication_data_type": compression} if compression in ("fp16", "bf16") else {}


def _activation_checkpointing(plan: Plan) -> dict[str, object]:
    """Return the settings of `deepspeed.checkpointing`; the model's own is switched on in the model, not here."""
    if plan.configuration.activation_checkpointing == "none":
        return {}
    return {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": plan.configuration.activations_on_host,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        }
    }
