"""Jobs for the tests of the time model: a small GPT whose costs can be worked out by hand, and catalogue models."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from hardware_db.datasheets import find_device, find_link
from planner.models.catalogue import find_model, models
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts
from planner.models.tasks import default_sequence_length, default_task
from planner.types.cluster import Cluster
from planner.types.job import Job, Workload
from planner.types.plan import Configuration

SHARDED = ("fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
FIRST_OF_TYPE = {facts.model_type: facts for facts in reversed(models())}
"""A row of the catalogue for each structure: the suite runs these, the long checks all rows."""


@lru_cache
def cluster(
    gpus_per_node: int = 8,
    nodes: int = 1,
    *,
    device: str = "A100-SXM4-80GB",
    intra: str | None = "nvlink3-a100",
    inter: str | None = "ib-hdr",
) -> Cluster:
    named = find_device(device)
    return Cluster(
        device=named,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        capacity_bytes=named.capacity_bytes or 16 << 30,
        intra_link=find_link(intra) if intra else None,
        inter_link=find_link(inter) if inter else None,
        nics_per_node=4,
        host_cores_per_node=48,
    )


def make_job(facts: ModelFacts | str = "facebook/opt-125m", where: Cluster | None = None, **changes: Any) -> Job:
    """One micro-batch of one sample per rank unless `changes`, fields of Configuration, say otherwise."""
    where = where or cluster()
    facts = find_model(facts) if isinstance(facts, str) else facts
    strategy = changes.pop("strategy", "ddp")
    tp, pp = changes.pop("tp", 1), changes.pop("pp", 1)
    data = where.gpus // tp // pp
    replicas = changes.pop("dp_replicate", 1 if strategy in SHARDED else data)
    micro, steps = changes.pop("micro_batch_size", 1), changes.pop("gradient_accumulation_steps", 1)
    length = changes.pop("sequence_length", None) or default_sequence_length(facts)
    configuration = Configuration(
        strategy=strategy,
        backend="deepspeed" if strategy.startswith("zero") else "torch",
        dp_replicate=replicas,
        dp_shard=data // replicas,
        tp=tp,
        pp=pp,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        global_batch_size=micro * steps * data,
        sequence_length=length,
        precision=changes.pop("precision", "bf16"),
        optimizer=changes.pop("optimizer", "adamw"),
        **changes,
    )
    workload = Workload(
        task=default_task(facts),
        sequence_length=length,
        global_batch_size=configuration.global_batch_size,
        precision=configuration.precision,
    )
    return Job(
        facts=facts, counts=count_parameters(facts), workload=workload, cluster=where, configuration=configuration
    )


def on(job: Job, **cluster_changes: Any) -> Job:
    """The same job on a changed cluster of the same size."""
    return replace(job, cluster=replace(job.cluster, **cluster_changes))


def run_by(job: Job, code: str) -> Job:
    """The same job by another code base's modules."""
    return replace(job, workload=replace(job.workload, code=code))
