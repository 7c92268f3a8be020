"""Plan -> accelerate YAML, as `accelerate launch --config_file` reads it; ZeRO has its DeepSpeed JSON beside it."""

from __future__ import annotations

import yaml

from planner import vocabulary as words
from planner.emit.common import (
    DEFAULTS,
    EMIT_ELSEWHERE,
    EmitOptions,
    as_comment,
    converts_products,
    is_zero,
    node_layout,
    on_cpu,
    refuse,
    script_duties,
)
from planner.emit.deepspeed import CONFIG_NAME, as_json, config_without_optimizer
from planner.types.plan import Plan

_FORM = "an accelerate config"
_FILE = "accelerate.yaml"


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`accelerate.yaml`, and `deepspeed.json` beside it for ZeRO.

    Raises:
        ContradictoryRequest: accelerate has no form of this plan.
    """
    # `use_cpu` alone starts the ranks but leaves each of them a world of its own (accelerate 1.15).
    setting = "ACCELERATE_USE_CPU=true " if on_cpu(plan, options) else ""
    head = [f"# {setting}accelerate launch --config_file {_FILE} train.py", *_several_machines(plan)]
    body = yaml.safe_dump(accelerate_config(plan, options), sort_keys=False)
    files = {_FILE: "\n".join(head) + "\n" + as_comment(script_duties(plan, "accelerate", options)) + body}
    if is_zero(plan):
        files[CONFIG_NAME] = as_json(config_without_optimizer(plan, _FORM, options))
    return files


def accelerate_config(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, object]:
    """Return the mapping of the YAML file.

    Raises:
        ContradictoryRequest: accelerate has no form of this plan.
    """
    _refuse_what_accelerate_lacks(plan, options)
    nodes, _ = node_layout(plan)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        **_distribution(plan),
        "use_cpu": on_cpu(plan, options),
        "num_machines": nodes,
        "num_processes": plan.configuration.world_size,
        "machine_rank": 0,
        "rdzv_backend": "c10d" if nodes > 1 else "static",
        "same_network": True,
        "main_training_function": "main",
    }


def _several_machines(plan: Plan) -> list[str]:
    nodes, _ = node_layout(plan)
    if nodes == 1:
        return []
    return [
        "# On every machine, add: --machine_rank RANK --main_process_ip ADDRESS_OF_RANK_0 --main_process_port 29500"
    ]


def _refuse_what_accelerate_lacks(plan: Plan, options: EmitOptions) -> None:
    configuration = plan.configuration
    sharded = configuration.strategy in words.FSDP_STRATEGIES
    if on_cpu(plan, options) and (sharded or is_zero(plan)):
        raise refuse(plan, _FORM, "for CPU ranks", "accelerate shards on GPUs only; use `dsplan run`")
    for name, degree in (("pp", configuration.pp), ("ep", configuration.ep)):
        if degree > 1:
            raise refuse(plan, _FORM, f"with {name} {degree}", EMIT_ELSEWHERE)
    for name, degree in (("tp", configuration.tp), ("cp", configuration.cp)):
        if degree > 1 and not sharded:
            raise refuse(plan, _FORM, f"with {name} {degree}", f"accelerate combines {name} with FSDP only")
    if configuration.cp > 1 and configuration.attention != "sdpa":
        # torch's context_parallel replaces scaled_dot_product_attention and nothing else.
        raise refuse(plan, _FORM, f"with cp and attention {configuration.attention}", "plan with --attention sdpa")
    if configuration.tp > 1 and sharded and configuration.dp_shard * configuration.cp == 1:
        # accelerate 1.15, ParallelismConfig: FSDP shards over dp_shard x cp, which then has no ranks.
        reason = f"with tp {configuration.tp} over all its ranks"
        raise refuse(plan, _FORM, reason, "accelerate's FSDP needs ranks to shard over; plan with a smaller --tp")
    if sharded and configuration.dp_replicate > 1 and configuration.dp_shard == 1:
        # accelerate 1.15, ParallelismConfig: replicas without shards are DDP, which it combines with neither tp nor cp.
        raise refuse(plan, _FORM, "with dp_shard 1", "plan fsdp, or hsdp with two shards or more; alone it is ddp")
    if sharded:
        require_whole_offload(plan, _FORM)
    elif not is_zero(plan) and configuration.offload != "none":
        raise refuse(plan, _FORM, f"with offload {configuration.offload}", "choose FSDP or ZeRO")


def require_whole_offload(plan: Plan, form: str) -> None:
    """FSDP2 moves parameters, gradients and optimizer states to the host together, and never to disk.

    Raises:
        ContradictoryRequest: the plan offloads the optimizer alone, or to NVMe.
    """
    offload = plan.configuration.offload
    if offload not in ("none", "all"):
        raise refuse(plan, form, f"with offload {offload}", "FSDP offloads all or nothing; choose ZeRO")


def _distribution(plan: Plan) -> dict[str, object]:
    """Return the distributed type with its own section."""
    if is_zero(plan):
        # Precision and accumulation may not stand here as well: accelerate refuses a key that the JSON also holds.
        section = {"deepspeed_config_file": CONFIG_NAME, "zero3_init_flag": plan.configuration.zero_stage == 3}
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    precision = _precision(plan)
    if plan.configuration.strategy in words.FSDP_STRATEGIES:
        return {"distributed_type": "FSDP", **precision, "fsdp_config": _fsdp(plan), **_parallelism(plan)}
    if plan.configuration.world_size == 1:
        return {"distributed_type": "NO", **precision}
    # MULTI_CPU would start ranks through mpirun only; MULTI_GPU with use_cpu starts them as torchrun does.
    return {"distributed_type": "MULTI_GPU", **precision}


def _precision(plan: Plan) -> dict[str, object]:
    if converts_products(plan, "accelerate"):
        return {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
    words_of = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "fp4": "bf16"}
    return {"mixed_precision": words_of.get(plan.configuration.precision, "no")}


def _fsdp(plan: Plan) -> dict[str, object]:
    configuration = plan.configuration
    block = plan.model.get("block_class", "")
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": configuration.strategy != "fsdp-grad-op",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": block} if block else {}),
        "fsdp_offload_params": configuration.offload == "all",
        "fsdp_activation_checkpointing": configuration.activation_checkpointing == "full",
        # accelerate 1.15 refuses it beside torchao's layers.
        "fsdp_cpu_ram_efficient_loading": not converts_products(plan, "accelerate"),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _parallelism(plan: Plan) -> dict[str, object]:
    configuration = plan.configuration
    if configuration.dp_replicate == configuration.tp == configuration.cp == 1:
        return {}
    sizes = {"dp_replicate": configuration.dp_replicate, "dp_shard": configuration.dp_shard, "tp": configuration.tp}
    sizes["cp"] = configuration.cp
    return {"parallelism_config": {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}}
