"""Published training rows as jobs, for the scripts that check and fit the time model.

`published_training.csv` holds the rows in the words of a plan, `tp_dp_pp_a100.csv` vTrain's grid. A row's `reading`
says how it may be used: `stated` (the document has the whole plan), `interpreted` (part of it comes from elsewhere in
the repository), `vendor` (tuned by the vendor until best, and recomputation not stated) or `disclaimed` (its own
authors say that it cannot be compared). Only stated rows are fitted to, and only they make the headline figures.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.datasheets import find_device, find_link
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts
from planner.types.cluster import Cluster
from planner.types.job import Job, Workload
from planner.types.plan import Configuration
from scripts.fit.published_code import code_of, is_compiled

MEASUREMENTS = Path(__file__).resolve().parents[2] / "hardware_db" / "measurements"
MEGATRON_SOURCES = ("bigscience", "vtrain")
"""Megatron-LM trains with its default hidden dropout of 0.1 unless told otherwise."""

TRANSFORMER_OF_VTRAIN = {
    "ffn": "",
    "vocab": "50257",
    "gated": "no",
    "norm": "layernorm",
    "position": "learned",
    "offload": "none",
    "code": "",
    "reading": "stated",
    "why": "",
}

SAME_BATCH = 1.05
"""Global batches that differ by less are taken for one: authors round a batch that the degrees do not divide."""

Reading = Literal["stated", "interpreted", "vendor", "disclaimed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A measured step: `alike` groups runs that differ only in their plan, `document` those of one publication.

    `name` is the source and the place of the run within it, from 1.
    """

    name: str
    source: str
    document: str
    reading: Reading
    why: str
    model: str
    job: Job
    measured_seconds: float
    alike: str

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Return what was measured, as a rate."""
        return self.rate(self.measured_seconds)

    def rate(self, seconds: float) -> float:
        """Tokens per second and GPU of a step that takes so long."""
        plan = self.job.configuration
        return plan.global_batch_size * plan.sequence_length / seconds / plan.world_size


def document_of(source: str) -> str:
    """The publication of a source: versions and neighbouring tables of one document belong together."""
    documents = (
        "llmfoundry",
        "torchtitan",
        "torchao",
        "fms_fsdp",
        "internevo",
        "dgxc",
        "qwen",
        "nemo_launcher",
        "alpa",
    )
    return next((name for name in documents if source.startswith(name)), source)


def _architecture(row: Mapping[str, str]) -> tuple[ModelFacts, ParameterCounts]:
    hidden, layers, heads = int(row["hidden"]), int(row["layers"]), int(row["heads"])
    kv_heads = int(row.get("kv_heads") or heads)
    vocabulary, gated = int(row["vocab"]), row["gated"] == "yes"
    width = int(row["ffn"] or 4 * hidden)
    head_dim = hidden // heads
    block = 2 * hidden * head_dim * (heads + kv_heads) + (3 if gated else 2) * hidden * width
    tied = row.get("tied", "yes") == "yes"
    counts = ParameterCounts(
        embedding=vocabulary * hidden,
        blocks=(BlockCount(name="block", repeats=layers, parameters=block),),
        head=0 if tied else vocabulary * hidden,
        other=2 * hidden,
    )
    facts = ModelFacts(
        name=row["model"],
        family="published",
        model_type="published",
        architecture="published",
        kind="decoder",
        parameters=counts.total,
        active_parameters=counts.total,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        vocab_size=vocabulary,
        gated_mlp=gated,
        norm=row["norm"],
        position_type=row["position"],
        tie_word_embeddings=tied,
        hidden_dropout=0.1 if row["source"].startswith(MEGATRON_SOURCES) else 0.0,
    )
    return facts, counts


def _cluster(row: Mapping[str, str]) -> Cluster:
    device = find_device(row["device"])
    if row.get("memory_bandwidth_gbs"):
        device = replace(device, memory_bandwidth_gbs=float(row["memory_bandwidth_gbs"]))
    if row.get("power_watts") and device.tdp_watts:
        # Dynamic power follows the cube of the clock, and the peak follows the clock.
        share = (float(row["power_watts"]) / device.tdp_watts) ** (1 / 3)
        limited = {name: peak * share if peak else peak for name, peak in device.peak_tflops_dense.items()}
        device = replace(device, peak_tflops_dense=limited)
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    return Cluster(
        device=device,
        nodes=-(-gpus // per_node),
        gpus_per_node=per_node,
        capacity_bytes=device.capacity_bytes or 0,
        intra_link=find_link(row["intra_link"]),
        inter_link=find_link(row["inter_link"]) if row["inter_link"] else None,
        nics_per_node=int(row["nics"]),
    )


def _run(row: Mapping[str, Any], name: str) -> PublishedRun:
    facts, counts = _architecture(row)
    sequence = int(row["sequence_length"])
    shard, replicas = int(row["dp_shard"]), int(row["dp_replicate"])
    batch = int(row["micro_batch"]) * int(row["grad_accum"]) * shard * replicas
    configuration = Configuration(
        strategy=row["strategy"],
        backend=row["backend"],
        dp_shard=shard,
        dp_replicate=replicas,
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        micro_batch_size=int(row["micro_batch"]),
        gradient_accumulation_steps=int(row["grad_accum"]),
        global_batch_size=batch,
        sequence_length=sequence,
        precision=row["precision"],
        optimizer=row["optimizer"],
        attention=row["attention"],
        activation_checkpointing=row["checkpointing"],
        offload=row["offload"],
    )
    workload = Workload(
        task="causal-lm",
        sequence_length=sequence,
        global_batch_size=batch,
        precision=configuration.precision,
        code=code_of(row),
        compile=is_compiled(row),
    )
    job = Job(facts=facts, counts=counts, workload=workload, cluster=_cluster(row), configuration=configuration)
    gpus = int(row["gpus"])
    seconds = (
        float(row["step_seconds"])
        if row.get("step_seconds")
        else (batch * sequence / float(row["tokens_per_s_per_gpu"]) / gpus)
    )
    return PublishedRun(
        name=name,
        source=row["source"],
        document=document_of(row["source"]),
        reading=row["reading"],
        why=row["why"],
        model=row["model"],
        job=job,
        measured_seconds=seconds,
        alike=_alike(row["source"], job),
    )


def _alike(source: str, job: Job) -> str:
    """Return what a run shares with those that differ only in their plan."""
    facts, plan = job.facts, job.configuration
    batch = round(math.log(plan.global_batch_size) / math.log(SAME_BATCH))
    shape = (facts.hidden_size, facts.num_layers, facts.num_heads, plan.sequence_length)
    where = (job.cluster.device.name, job.cluster.gpus)
    return " ".join(map(str, (source, *shape, *where, batch, plan.precision)))


RECOMPUTED_FROM = 64
"""GPUs from which vTrain's runs recompute: with a fourth pass the products of smaller ones would need 280 of an A100's
312 TFLOP/s, those of larger ones reach 100 to 164."""


def _vtrain_row(row: Mapping[str, str]) -> dict[str, str]:
    """A row of tp_dp_pp_a100.csv in the columns of published_training.csv; what its files leave out stands here."""
    gpus, dp, micro_batch = int(row["n_gpus"]), int(row["dp"]), int(row["micro_batch"])
    return TRANSFORMER_OF_VTRAIN | {
        "source": "vtrain_a100",
        "model": f"gpt {row['hidden']}x{row['layers']}",
        "hidden": row["hidden"],
        "layers": row["layers"],
        "heads": row["heads"],
        "vocab": "50257" if row["tp"] == "1" else str(-(-50257 // (128 * int(row["tp"]))) * 128 * int(row["tp"])),
        "sequence_length": row["seq_len"],
        "device": "A100-SXM4-80GB",
        "gpus": str(gpus),
        "gpus_per_node": str(min(8, gpus)),
        "intra_link": "nvlink3-a100",
        "inter_link": "ib-hdr",
        "nics": "4",
        "strategy": "zero1",
        "backend": "deepspeed",
        "dp_replicate": "1",
        "dp_shard": str(dp),
        "tp": row["tp"],
        "pp": row["pp"],
        "micro_batch": str(micro_batch),
        "grad_accum": str(int(row["global_batch"]) // micro_batch // dp),
        "checkpointing": "full" if gpus >= RECOMPUTED_FROM else "none",
        "precision": "fp16",
        "optimizer": "adamw-fused",
        "attention": "eager",
        "step_seconds": str(float(row["iteration_ms"]) / 1e3),
    }


def published_runs() -> Iterator[PublishedRun]:
    """Every run of the two files, in file order."""
    seen: Counter[str] = Counter()
    for row in _rows():
        seen[row["source"]] += 1
        yield _run(row, f"{row['source']}-{seen[row['source']]}")


def _rows() -> Iterator[Mapping[str, str]]:
    with (MEASUREMENTS / "published_training.csv").open(newline="") as lines:
        yield from csv.DictReader(lines)
    with (MEASUREMENTS / "tp_dp_pp_a100.csv").open(newline="") as lines:
        yield from map(_vtrain_row, csv.DictReader(lines))
