"""TrainingConfig: a plan under the names that training scripts read, and as the arguments of their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.units import GB
from planner import vocabulary as words
from planner.emit.common import DEFAULTS, EmitOptions, is_zero, refuse
from planner.types.plan import Plan

_SHARDING = {"fsdp": "FULL_SHARD", "fsdp-grad-op": "SHARD_GRAD_OP", "hsdp": "HYBRID_SHARD"}


class Answer(dict[str, Any]):
    """Answer of a selector: read-only, and `json.dumps` takes it as it is.

    `plan` is the plan that it says this of, None where nothing is trained.
    """

    def __init__(self, values: Mapping[str, Any], plan: Plan | None = None) -> None:
        super().__init__(values)
        self._plan = plan

    @property
    def plan(self) -> Plan | None:
        """The plan that the answer is made of."""
        return self._plan


def _refuse_change(answer: Answer, *_: object, **__: object) -> None:
    raise TypeError("an answer is read-only; change dict(answer)")


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Answer, _name, _refuse_change)


class TrainingConfig(Answer):
    """A plan under the names that training scripts read; memory is in GB (1e9 bytes), batches in samples.

    `per_gpu_batch_size` is the micro-batch: times `gpu_count` and `gradient_accumulation_steps` it is always
    `global_batch_size`. `distributed_strategy` is DDP (one GPU included, where DDP changes nothing), FSDP or DeepSpeed;
    `strategy` the plan's exact word. `deepspeed_config` and `fsdp_config` are there only where they apply.
    """

    def __init__(self, plan: Plan, **details: Any) -> None:
        super().__init__({**_values(plan), **details}, plan)
        self._of = plan

    @property
    def plan(self) -> Plan:
        """The plan that the answer is made of."""
        return self._of

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"

    def to_training_arguments(self, options: EmitOptions = DEFAULTS) -> dict[str, Any]:
        """Keyword arguments of transformers' `TrainingArguments`, sharding included.

        They recompute whole blocks where the plan recomputes a part of them.

        Raises:
            ContradictoryRequest: TrainingArguments has no form of this plan (HSDP).
        """
        from planner.emit.common import recomputing_whole_blocks
        from planner.emit.huggingface import training_arguments

        return training_arguments(recomputing_whole_blocks(self.plan), options)

    def to_deepspeed_config(self, options: EmitOptions = DEFAULTS) -> dict[str, Any]:
        """Return what `deepspeed.initialize(config=...)` takes.

        Raises:
            ContradictoryRequest: the plan is FSDP.
        """
        from planner.emit.deepspeed import deepspeed_config

        return deepspeed_config(self.plan, options)

    def to_fsdp_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of torch's `fully_shard`, for each block and then for the whole model. Imports torch.

        Shards that several groups of ranks copy (hsdp, or another `dp_replicate`) also need `mesh`, two dimensions of
        `plan.configuration.dp_replicate` and `dp_shard`.

        Raises:
            ContradictoryRequest: the plan is not FSDP.
            DsplanError: torch is not installed.
        """
        configuration = self.plan.configuration
        if configuration.strategy not in words.FSDP_STRATEGIES:
            raise refuse(self.plan, "fully_shard arguments", "", "see its distributed_strategy")
        try:
            from strategies.backends.fsdp import fully_shard_arguments
        except ImportError:
            raise DsplanError("fully_shard arguments need torch 2.6 or newer; pip install dsplan[train]") from None
        return fully_shard_arguments(configuration)


def distributed_strategy(plan: Plan) -> str:
    """DDP, FSDP or DeepSpeed."""
    if is_zero(plan):
        return "DeepSpeed"
    return "FSDP" if plan.configuration.strategy in words.FSDP_STRATEGIES else "DDP"


def estimated_memory(plan: Plan) -> dict[str, float]:
    """GB per category at the peak of the busiest GPU.

    `per_gpu_gb` is what `nvidia-smi` shows, `per_gpu_needed_gb` what must be there, `per_gpu_upper_gb` what nineteen of
    twenty runs stay below, `host_gb` what a node's host needs.
    """
    amounts = {name: value / GB for name, value in asdict(plan.memory).items() if name.endswith("_bytes")}
    categories = {f"{name}_gb": amounts[f"{name}_bytes"] for name in _CATEGORIES}
    return {
        **categories,
        "peak_allocated_gb": amounts["peak_allocated_bytes"],
        "device_overhead_gb": amounts["device_overhead_bytes"],
        "per_gpu_gb": amounts["device_used_bytes"],
        "per_gpu_needed_gb": amounts["device_needed_bytes"],
        "per_gpu_upper_gb": amounts["device_used_upper_bytes"],
        "host_gb": plan.memory.host_bytes_per_node / GB,
    }


_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporaries")


def _values(plan: Plan) -> dict[str, Any]:
    configuration = plan.configuration
    recomputes = configuration.activation_checkpointing != "none"
    values: dict[str, Any] = {
        "distributed_strategy": distributed_strategy(plan),
        "strategy": configuration.strategy,
        "hardware": plan.cluster["device"],
        "gpu_count": configuration.world_size,
        "per_gpu_batch_size": configuration.micro_batch_size,
        "gradient_accumulation_steps": configuration.gradient_accumulation_steps,
        "global_batch_size": configuration.global_batch_size,
        "sequence_length": configuration.sequence_length,
        "mixed_precision": configuration.precision in words.MIXED_PRECISIONS,
        "precision": configuration.precision,
        "optimizer": configuration.optimizer,
        "gradient_checkpointing": recomputes,
        "estimated_memory": estimated_memory(plan),
        "verdict": plan.verdict,
    }
    if is_zero(plan):
        values["deepspeed_config"] = {
            "zero_stage": configuration.zero_stage,
            "offload_optimizer": configuration.offload != "none",
            "offload_param": configuration.offload in ("all", "nvme"),
            "offload_device": {"none": "none", "nvme": "nvme"}.get(configuration.offload, "cpu"),
        }
    elif configuration.strategy in _SHARDING:
        values["fsdp_config"] = {
            "sharding_strategy": _SHARDING[configuration.strategy],
            "cpu_offload": configuration.offload != "none",
            "activation_checkpointing": recomputes,
        }
    return values
