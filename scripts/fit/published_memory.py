"""Published runs that print the memory they took, or that they ran out of it, as requests with one configuration.

The rows stand in `hardware_db/measurements/published_memory.csv`, one per run, in the words of a plan; `like` names the
catalogued model whose code is nearest, and the architecture's own numbers replace that model's. Runs that no plan can
say are counted with the reason in `published_memory_left_out.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardware_db.datasheets import find_device
from hardware_db.units import GIB
from planner.cost.code_bases import facts_for_code
from planner.cost.verdict import judge
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts
from planner.search.estimate import price
from planner.search.request import Request
from planner.types.cluster import Cluster
from planner.types.job import Workload
from planner.types.plan import Configuration, MemoryEstimate
from planner.vocabulary import Verdict

MEASUREMENTS = Path(__file__).resolve().parents[2] / "hardware_db" / "measurements"
Row = Mapping[str, Any]
GPT_CODES = ("llm-foundry", "megatron-deepspeed", "megatron", "alpa")
TORCHTITAN_2024 = ("torchao_float8-266", "torchao_float8nocompile-278", "torchao_float8nocompile-284")
"""torchao's runs on H100, which are of 2024; those on MI300X and B200 are later."""
CODES = {
    "transformers": "transformers",
    "transformers, deepspeed": "transformers",
    "torchtitan": "torchtitan",
    "torchtune": "torch",
    "fms-fsdp": "torch",
    "megatron-core": "megatron",
    "megatron": "megatron-deepspeed",
    "megatron-deepspeed": "megatron-deepspeed",
    "nemo": "nemo",
    "llm-foundry": "llm-foundry",
    "litgpt": "litgpt",
    "internevo": "internevo",
    "jax, xla": "alpa",
    "bmtrain": "transformers",
    "colossalai": "transformers",
}
"""The code base of each word in the file, the nearest where it is none: torchtune and fms-fsdp write their blocks out
by hand, and Megatron's rows are of 2021, before Transformer Engine and the distributed optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A run that was published: `code` is whose modules it ran.

    `memory_bytes` was printed, 0 where only that it ran, or ran out, is known; `kind` says what was printed (allocated,
    reserved, nvidia-smi or unknown).
    """

    case: str
    source: str
    model: str
    code: str
    ran: bool
    memory_bytes: float
    kind: str
    assumed: str
    document: str
    request: Request
    configuration: Configuration

    def predicted(self) -> tuple[MemoryEstimate, Verdict]:
        """Return what dsplan says of the run."""
        priced = price(self.request, self.configuration)
        return priced.memory, judge(priced.job, priced.memory).verdict

    def keeps_margins(self) -> bool:
        """Return whether dsplan would propose it where anything else fits too."""
        priced = price(self.request, self.configuration)
        return judge(priced.job, priced.memory).keeps_margins


def predicted_bytes(memory: MemoryEstimate, kind: str) -> int:
    """The figure of an estimate that is comparable: a figure of unknown kind is taken for what nvidia-smi shows."""
    if kind == "allocated":
        return memory.peak_allocated_bytes
    return memory.peak_reserved_bytes if kind == "reserved" else memory.device_used_bytes


def published_runs() -> Iterator[PublishedRun]:
    """Every run, in file order."""
    with (MEASUREMENTS / "published_memory.csv").open(newline="", encoding="utf-8") as lines:
        yield from map(_run, csv.DictReader(lines))


def left_out() -> list[Row]:
    """Rows of the collection that were not taken, counted by source and reason."""
    with (MEASUREMENTS / "published_memory_left_out.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _run(row: Row) -> PublishedRun:
    facts, configuration = _facts(row), _configuration(row)
    workload = Workload(
        task="seq2seq" if facts.kind == "encoder-decoder" else "causal-lm",
        sequence_length=configuration.sequence_length,
        global_batch_size=configuration.global_batch_size,
        precision=configuration.precision,
        optimizer=configuration.optimizer,
        attention=configuration.attention,
        code=_code(row),
        compile=row["code"].endswith(", compiled"),
    )
    return PublishedRun(
        **{name: row[name] for name in ("case", "source", "model", "code", "assumed", "document")},
        ran=row["ran"] == "yes",
        memory_bytes=float(row["memory_gib"] or 0) * GIB,
        kind=row["memory_kind"],
        request=Request(facts=facts, counts=count_parameters(facts), workload=workload, cluster=_cluster(row)),
        configuration=configuration,
    )


def _code(row: Row) -> str:
    """The code base's name; what torchtitan published in 2024 ran the code of then."""
    dated = row["source"].startswith("torchtitan_h100_2024") or row["case"] in TORCHTITAN_2024
    return "torchtitan-2024" if dated else CODES[row["code"].removesuffix(", compiled")]


def _facts(row: Row) -> ModelFacts:
    """The catalogued model with the row's own numbers; a row that gives none is that model."""
    like = facts_for_code(find_model(row["like"]), _code(row))
    if _code(row) in GPT_CODES:
        like = replace(like, position_type="learned")  # of GPT and MPT; its positions are in the file's own counts
    if row["code"] == "megatron-core":
        like = replace(like, hidden_dropout=0.1, attention_dropout=0.1)  # what its argument parser fills in
    if row["code"] == "litgpt":  # its files leave `tie_embeddings` empty, which unties them
        return replace(like, tie_word_embeddings=False)
    if not row["hidden"]:
        return like
    hidden, heads = int(row["hidden"]), int(row["heads"])
    numbers: dict[str, Any] = {
        "name": row["model"],
        "hidden_size": hidden,
        "num_layers": int(row["layers"]),
        "num_heads": heads,
        "num_kv_heads": int(row["kv_heads"]),
        "head_dim": hidden // heads,
        "intermediate_size": int(row["ffn"] or 4 * hidden),
        "vocab_size": int(row["vocab"]),
        "sliding_window": 0,
    }
    if like.learned_positions:
        numbers["max_position_embeddings"] = int(row["sequence_length"])
    return replace(like, **numbers)


def _cluster(row: Row) -> Cluster:
    device = find_device(row["device"])
    gpus, per_node = int(row["gpus"]), int(row["gpus_per_node"])
    capacity = float(row["capacity_gib"]) * GIB if row["capacity_gib"] else device.capacity_bytes or 0
    return Cluster(
        device=device,
        nodes=-(-gpus // per_node),
        gpus_per_node=min(gpus, per_node),
        capacity_bytes=round(capacity),
    )


def _configuration(row: Row) -> Configuration:
    words = ("strategy", "backend", "precision", "optimizer", "attention", "offload")
    named: Row = {name: row[name] for name in words}
    degrees: Row = {name: int(row[name]) for name in ("dp_replicate", "dp_shard", "tp", "pp")}
    micro, accumulation = int(row["micro_batch"]), int(row["grad_accum"])
    return Configuration(
        **named,
        **degrees,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        global_batch_size=micro * accumulation * degrees["dp_replicate"] * degrees["dp_shard"],
        sequence_length=int(row["sequence_length"]),
        activation_checkpointing=row["checkpointing"],
        sync_each_micro_batch=row["sync_each_micro_batch"] == "yes",
        sequence_parallel=row["code"] == "nemo" and degrees["tp"] > 1,  # as its recipes have it
    )
