"""Peaks of Megatron-LM's own functional tests on the last rank of each pipeline: stages, tp, sp, cp and schedules."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from planner.cost.memory.estimate import phases_of
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from tests.planner.cost.timing.cases import cluster

GOLDEN: tuple[tuple[float, dict[str, Any]], ...] = (
    (2.36004, {"activation_checkpointing": "full"}),
    (4.41073, {"strategy": "zero1"}),
    (3.38317, {"pp": 2}),
    (3.32482, {"pp": 2}),
    (2.5599, {"pp": 4}),
    (2.50108, {"pp": 4}),
    (3.83957, {"pp": 4, "virtual_stages": 3}),
    (3.6439, {"pp": 4, "virtual_stages": 3, "strategy": "zero1"}),
    (1.76966, {"pp": 2, "tp": 2}),
    (1.43742, {"tp": 4, "strategy": "zero1"}),
    (1.06167, {"tp": 2, "cp": 2, "sequence_parallel": True, "attention": "flash"}),
    (0.871023, {"tp": 2, "pp": 2, "cp": 2, "sequence_parallel": True, "attention": "flash"}),
    (1.16462, {"pp": 2, "cp": 4, "attention": "flash"}),
)
"""GiB allocated at the most (`mem-max-allocated-bytes`) and how it was run: NVIDIA/Megatron-LM@d98e8a64ddf3,
tests/functional_tests/test_cases/gpt/*/golden_values_dev_dgx_{a100,h100,gb200}.json, on 8 GPUs."""


def predicted(**options: Any) -> float:
    """GiB on the last stage: 12 layers of width 512 over 1024 tokens, 4 samples a micro-batch, 32 a step."""
    options = {"strategy": "ddp", "tp": 1, "pp": 1, "cp": 1, "attention": "eager", **options}
    facts = replace(
        find_model("gpt2"),
        name="golden",
        hidden_size=512,
        num_layers=12,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=50304,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    ranks = 8 // (options["tp"] * options["pp"] * options["cp"])
    is_sharded = options["strategy"] == "zero1"
    configuration = Configuration(
        backend="deepspeed" if is_sharded else "torch",
        dp_replicate=1 if is_sharded else ranks,
        dp_shard=ranks if is_sharded else 1,
        pp_schedule="interleaved" if options.get("virtual_stages") else "1f1b",
        micro_batch_size=4,
        gradient_accumulation_steps=8 // ranks,
        global_batch_size=32,
        sequence_length=1024,
        precision="bf16",
        optimizer="adamw-fused",
        **options,
    )
    workload = Workload(task="causal-lm", sequence_length=1024, global_batch_size=32, code="megatron")
    job = Job(
        facts=facts,
        counts=count_parameters(facts),
        workload=workload,
        cluster=cluster(),
        configuration=configuration,
        stage=configuration.pp - 1,
    )
    phases = phases_of_stage(job)
    return max(phases.values()) / 2**30


def phases_of_stage(job: Job) -> dict[str, float]:
    """Peaks of the job's own stage; of an estimate the busiest stage counts."""
    return {name: ledger.total for name, ledger in phases_of(job, stages=(job.stage,)).items() if name != "load"}


def test_the_last_stage_holds_what_megatron_measured() -> None:
    ratios = [predicted(**options) / measured for measured, options in GOLDEN]
    assert 0.96 <= statistics.median(ratios) <= 1.04
    assert min(ratios) >= 0.87
    assert max(ratios) <= 1.05
