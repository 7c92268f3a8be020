"""Plans made by hand for the emit tests; their prices are zero, which no config reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.models.catalogue import find_model
from planner.types.plan import Configuration, MemoryEstimate, Plan, StepTime, Throughput

OPT_6_7B: dict[str, object] = {
    "name": "opt-6.7b",
    "family": "opt",
    "model_type": "opt",
    "block_class": "OPTDecoderLayer",
    "parameters": 6_658_473_984,
    "hidden_size": 4096,
    "num_layers": 32,
    "vocab_size": 50272,
}
TINY: dict[str, object] = {**OPT_6_7B, "name": "tiny", "parameters": 20_000, "hidden_size": 32, "num_layers": 2}


def catalogue_model(name: str) -> dict[str, object]:
    """The model section of a plan for a model of the catalogue."""
    facts = find_model(name)
    keys = ("name", "family", "model_type", "block_class", "parameters", "hidden_size", "num_layers", "vocab_size")
    return {key: getattr(facts, key) for key in keys}


_ZERO_MEMORY = MemoryEstimate(
    parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0, buffers_bytes=0, temporaries_bytes=0,
    peak_allocated_bytes=0, peak_phase="forward", peak_reserved_bytes=0, device_overhead_bytes=0, device_used_bytes=0,
    device_used_upper_bytes=0, host_bytes_per_node=0,
)  # fmt: skip
_ZERO_TIME = StepTime(
    step_seconds=0.0, compute_seconds=0.0, communication_seconds=0.0, exposed_communication_seconds=0.0,
    offload_seconds=0.0, optimizer_seconds=0.0, bubble_seconds=0.0,
)  # fmt: skip


def make_plan(
    strategy: str = "ddp",
    *,
    gpus: int = 8,
    nodes: int = 1,
    vendor: str = "nvidia",
    model: dict[str, object] | None = None,
    workload: dict[str, object] | None = None,
    **changes: Any,
) -> Plan:
    """A plan of `strategy` over `gpus` devices; `changes` replace fields of its configuration.

    Unless told otherwise: micro-batch 2, accumulation 4, all ranks replicate (ddp) or shard (the rest).
    """
    gpus = 1 if strategy == "single" else gpus
    split = {"dp_replicate": gpus} if strategy in ("single", "ddp") else {"dp_shard": gpus}
    fields: dict[str, Any] = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, **split, **changes}
    samples = fields["micro_batch_size"] * fields["gradient_accumulation_steps"]
    fields.setdefault("global_batch_size", samples * fields.get("dp_replicate", 1) * fields.get("dp_shard", 1))
    fields.setdefault("backend", "deepspeed" if strategy.startswith("zero") else "torch")
    defaults = {"sequence_length": 2048, "precision": "bf16", "optimizer": "adamw"}
    return Plan(
        model=model or OPT_6_7B,
        cluster={
            "device": "H100 SXM",
            "vendor": vendor,
            "capacity_bytes": 80_000_000_000,
            "gpus": gpus,
            "nodes": nodes,
            "gpus_per_node": gpus // nodes,
        },
        configuration=Configuration(strategy=strategy, **{**defaults, **fields}),  # type: ignore[arg-type]
        memory=_ZERO_MEMORY,
        time=_ZERO_TIME,
        throughput=Throughput(tokens_per_second_per_gpu=0.0, samples_per_second=0.0, tflops_per_gpu=0.0, mfu=None),
        verdict="fits",
        limited_by="compute",
        runnable=True,
        workload=workload or {},
    )


def with_fields(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, configuration=replace(plan.configuration, **changes))
