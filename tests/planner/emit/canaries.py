"""The canary cases whose emitted files are frozen under `frozen/`, byte for byte."""

from __future__ import annotations

from pathlib import Path

from planner.emit import FORMATS, emit
from planner.errors import ContradictoryRequest
from planner.types.plan import Plan
from tests.planner.emit.plans import TINY, make_plan

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
}


def frozen_files(plan: Plan) -> dict[str, str]:
    """`{FORMAT/FILE: text}` over every format; a refusal is the text of `FORMAT/refused.txt`."""
    files = {}
    for format in FORMATS:
        try:
            emitted = emit(plan, format)
        except ContradictoryRequest as refusal:
            emitted = {"refused.txt": f"{refusal}\n"}
        files |= {f"{format}/{name}": text for name, text in emitted.items()}
    return files
