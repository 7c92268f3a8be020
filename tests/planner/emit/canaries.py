"""The canary cases whose emitted files are frozen under `frozen/`, byte for byte."""

from __future__ import annotations

from pathlib import Path

from planner.emit import FORMATS, emit
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from tests.planner.emit.plans import TINY, catalogue_model, make_plan

FROZEN = Path(__file__).parent / "frozen"

CANARIES: dict[str, Plan] = {
    "single-fp32-sgd": make_plan("single", precision="fp32", optimizer="sgd"),
    "ddp-2-nodes-fused": make_plan("ddp", gpus=16, nodes=2, optimizer="adamw-fused"),
    "ddp-cpu": make_plan("ddp", gpus=2, vendor="cpu", model=TINY, precision="fp32"),
    "fsdp-full-checkpointing": make_plan("fsdp", activation_checkpointing="full"),
    "fsdp-offload-flash": make_plan("fsdp", offload="all", attention="flash"),
    "fsdp-grad-op-fp16": make_plan("fsdp-grad-op", precision="fp16"),
    "hsdp-2-nodes": make_plan("hsdp", gpus=16, nodes=2, dp_replicate=2, dp_shard=8),
    "zero1-8bit": make_plan("zero1", optimizer="adamw-8bit"),
    "zero2-offload": make_plan("zero2", offload="optimizer", activation_checkpointing="selective"),
    "zero3-offload-all": make_plan("zero3", offload="all", activation_checkpointing="full"),
    "zero3-nvme": make_plan("zero3", offload="nvme", precision="fp16"),
    "zero3-bf16-pure": make_plan("zero3", precision="bf16-pure"),
    "tp2-pp2": make_plan("fsdp", dp_shard=2, tp=2, pp=2),
    "llama-fsdp-tp8": make_plan(
        "fsdp",
        gpus=64,
        nodes=8,
        dp_shard=8,
        tp=8,
        sequence_parallel=True,
        model=catalogue_model("llama-3-8b"),
        workload={"code": "torchtitan", "compile": True, "task": "causal-lm"},
        activation_checkpointing="selective",
    ),
    "llama-fsdp-cp2-tp2-fp8": make_plan(
        "fsdp",
        gpus=16,
        nodes=2,
        dp_shard=4,
        cp=2,
        tp=2,
        precision="fp8",
        model=catalogue_model("llama-3-8b"),
        workload={"fp8_recipe": "rowwise", "loss": "chunked"},
    ),
    "llama-zero1-tp4-pp4": make_plan(
        "zero1",
        gpus=64,
        nodes=8,
        dp_shard=4,
        tp=4,
        pp=4,
        gradient_accumulation_steps=16,
        sequence_parallel=True,
        activation_checkpointing="full",
        model=catalogue_model("llama-3-70b"),
        workload={"code": "megatron"},
    ),
    "llama-fsdp-interleaved": make_plan(
        "fsdp",
        gpus=64,
        nodes=8,
        dp_shard=4,
        tp=4,
        pp=4,
        pp_schedule="interleaved",
        virtual_stages=5,
        gradient_accumulation_steps=16,
        model=catalogue_model("llama-3-70b"),
    ),
    "deepseek-zero1-pp16-ep64": make_plan(
        "zero1",
        gpus=1024,
        nodes=128,
        dp_shard=64,
        pp=16,
        ep=64,
        gradient_accumulation_steps=32,
        activation_checkpointing="full",
        model=catalogue_model("deepseek-v3"),
    ),
    "qlora-fused-loss": make_plan(
        "ddp",
        precision="bf16",
        optimizer="adamw-8bit-paged",
        workload={
            "method": "qlora",
            "lora_rank": 16,
            "lora_targets": "all-linear",
            "load_dtype": "nf4",
            "loss": "fused",
        },
    ),
}


def frozen_files(plan: Plan) -> dict[str, str]:
    """`{FORMAT/FILE: text}` over every format; refusals are the lines of `refused.txt`."""
    files, refused = {}, ""
    for format in FORMATS:
        try:
            files |= {f"{format}/{name}": text for name, text in emit(plan, format).items()}
        except ContradictoryRequest as refusal:
            refused += f"{format}: {refusal}\n"
    return {**files, "refused.txt": refused} if refused else files
