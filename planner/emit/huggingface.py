"""Plan -> the arguments of transformers 5's `TrainingArguments`, with a torchrun script beside them."""

from __future__ import annotations

import json

from planner import vocabulary as words
from planner.emit.accelerate import require_whole_offload
from planner.emit.common import (
    DEFAULTS,
    EmitOptions,
    is_zero,
    on_cpu,
    refuse,
    require_data_parallel_only,
    script_duties,
)
from planner.emit.deepspeed import config_without_optimizer
from planner.emit.launchers import launch_script
from planner.types.plan import Plan

_FORM = "HF TrainingArguments"
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw-fused": "adamw_torch_fused",
    "adamw-forloop": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "adamw-8bit-paged": "paged_adamw_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
}


def emit(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, str]:
    """`training_arguments.json` and `torchrun.sh`.

    Raises:
        ContradictoryRequest: TrainingArguments has no form of this plan.
    """
    duties = script_duties(plan, "huggingface", options)
    arguments = json.dumps(training_arguments(plan, options), indent=2) + "\n"
    return {"training_arguments.json": arguments, "torchrun.sh": launch_script(plan, "torchrun.sh train.py", duties)}


def training_arguments(plan: Plan, options: EmitOptions = DEFAULTS) -> dict[str, object]:
    """Keyword arguments of `TrainingArguments`; JSON throughout.

    Raises:
        ContradictoryRequest: TrainingArguments has no form of this plan.
    """
    _refuse_what_trainer_lacks(plan, options)
    configuration = plan.configuration
    sixteen_bit = {"bf16": configuration.precision in ("bf16", "fp8", "fp4"), "fp16": configuration.precision == "fp16"}
    if is_zero(plan) and configuration.precision == "bf16-pure":
        sixteen_bit["bf16"] = True
    return {
        "per_device_train_batch_size": configuration.micro_batch_size,
        "gradient_accumulation_steps": configuration.gradient_accumulation_steps,
        **sixteen_bit,
        "optim": _OPTIMIZERS[configuration.optimizer],
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.gradient_clipping,
        **({"use_cpu": True} if on_cpu(plan, options) else {}),
        **_checkpointing(plan),
        **_sharding(plan, options),
    }


def _refuse_what_trainer_lacks(plan: Plan, options: EmitOptions) -> None:
    _refuse_what_needs_a_mesh(plan)
    require_data_parallel_only(plan, _FORM)
    if plan.configuration.optimizer not in _OPTIMIZERS:
        raise refuse(plan, _FORM, f"with optimizer {plan.configuration.optimizer}", "emit it as accelerate or torchrun")
    configuration = plan.configuration
    if configuration.strategy in words.FSDP_STRATEGIES:
        require_whole_offload(plan, _FORM)
        if on_cpu(plan, options):
            raise refuse(plan, _FORM, "for CPU ranks", "Trainer would run it as DDP there; use `dsplan run`")
    elif not is_zero(plan) and configuration.offload != "none":
        raise refuse(plan, _FORM, f"with offload {configuration.offload}", "choose FSDP or ZeRO")


def _refuse_what_needs_a_mesh(plan: Plan) -> None:
    """TrainingArguments takes a ParallelismConfig object, which JSON cannot hold; accelerate launch sets one."""
    configuration = plan.configuration
    sharded = configuration.strategy in words.FSDP_STRATEGIES and configuration.pp * configuration.ep == 1
    if sharded and (configuration.dp_replicate > 1 or configuration.splits_model):
        sizes = ((name, getattr(configuration, name)) for name in ("tp", "cp"))
        reason = " and ".join(f"{name} {size}" for name, size in sizes if size > 1)
        remedy = "emit it as accelerate and start the Trainer script with accelerate launch"
        raise refuse(plan, _FORM, f"with {reason}" if reason else "", remedy)


def _checkpointing(plan: Plan) -> dict[str, object]:
    """FSDP recomputes inside its own wrapping; elsewhere the model does it, without re-entering autograd.

    Both recompute whole blocks, which selective recomputation is not: that is left to the script.

    Off is said too: TRL's arguments have it on, and Trainer refuses it beside FSDP's own. The name is the one that
    every transformers 5 takes; 5.23 also has `activation_checkpointing` and warns that the old one goes with version 6.
    """
    wanted = plan.configuration.activation_checkpointing == "full"
    if not wanted or plan.configuration.strategy in words.FSDP_STRATEGIES:
        return {"gradient_checkpointing": False}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


def _sharding(plan: Plan, options: EmitOptions) -> dict[str, object]:
    if is_zero(plan):
        return {"deepspeed": config_without_optimizer(plan, _FORM, options)}
    if plan.configuration.strategy in words.FSDP_STRATEGIES:
        # Norms of gradients that are offloaded are reduced on the CPU, for which NCCL alone is no backend.
        backend = {"ddp_backend": words.GROUP_BACKENDS} if plan.configuration.offload == "all" else {}
        return {"fsdp": True, "fsdp_config": fsdp_config(plan), **backend, **_synchronisation(plan)}
    return {}


def _synchronisation(plan: Plan) -> dict[str, object]:
    """Trainer keeps whole gradients while it accumulates unless it is told to reduce in every micro-batch."""
    if plan.configuration.gradient_accumulation_steps == 1:
        return {}
    each = plan.configuration.sync_each_micro_batch
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": each}}}


def fsdp_config(plan: Plan) -> dict[str, object]:
    """Return the `fsdp_config` of TrainingArguments for FSDP2."""
    configuration = plan.configuration
    block = plan.model.get("block_class", "")
    return {
        "version": 2,
        "reshard_after_forward": configuration.strategy != "fsdp-grad-op",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"transformer_layer_cls_to_wrap": block.split(",")} if block else {}),
        "cpu_offload": configuration.offload == "all",
        "activation_checkpointing": configuration.activation_checkpointing == "full",
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
