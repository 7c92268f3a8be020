"""Every case that the accuracy report looks at: what was measured, what dsplan says of it today, and the question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from hardware_db.measured_rows import SHIPPED, MemoryRun, read_memory_runs
from planner.cost.memory.overhead import library_workspace
from planner.models.catalogue import find_model
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import Priced, price
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration, MemoryEstimate
from planner.vocabulary import Verdict
from scripts.fit.published_memory import PublishedRun, predicted_bytes, published_runs
from scripts.measure.machines import measured_cluster
from scripts.measure.memory_rows import compared

Truth = Literal["traced", "cpu", "gpu", "published"]
NOT_GPUS = (
    *("memory_traced.csv", "memory_terms.csv", "memory_cpu.csv", "memory_peers.csv", "compositions_cpu.csv"),
    "memory_emulated.csv",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run with its truth and its prediction, in bytes on the busiest rank.

    `measured` is 0 where only `ran` is known. `kind` says which figure it is: allocated, reserved, nvidia-smi, unknown.
    `states_measured` is the peak of the optimizer's step, where all states are alive and no activation is; 0 where
    it is not known. `used_measured` and `used_predicted` are what the driver shows. `code` is whose modules ran.
    """

    name: str
    truth: Truth
    source: str
    code: str
    model: str
    family: str
    kind: str
    ran: bool
    measured: float
    predicted: float
    states_measured: float
    used_measured: float
    used_predicted: float
    memory: MemoryEstimate
    verdict: Verdict
    note: str
    job: Job

    @property
    def error(self) -> float:
        """Signed: above 0 where dsplan says more than was measured."""
        return self.predicted / self.measured - 1

    @property
    def strategy(self) -> str:
        return self.job.configuration.strategy

    @property
    def how(self) -> str:
        """The configuration in a few words; what is usual is left out."""
        chosen = self.job.configuration
        degrees = " ".join(f"{name} {getattr(chosen, name)}" for name in ("tp", "pp") if getattr(chosen, name) > 1)
        words = [
            f"{chosen.strategy} x {chosen.dims.data_parallel}",
            degrees,
            f"{chosen.micro_batch_size} x {chosen.sequence_length}",
            chosen.precision,
            chosen.optimizer,
            chosen.attention if chosen.attention != "sdpa" else "",
            f"recompute {chosen.activation_checkpointing}" if chosen.activation_checkpointing != "none" else "",
            f"accumulate {chosen.gradient_accumulation_steps}" if chosen.gradient_accumulation_steps > 1 else "",
            f"offload {chosen.offload}" if chosen.offload != "none" else "",
        ]
        return ", ".join(word for word in words if word)


def all_cases() -> list[Case]:
    """Traced, on CPU ranks, on GPUs, published; of each as many as there are."""
    gpus = sorted(path for path in SHIPPED.glob("memory_*.csv") if path.name not in NOT_GPUS)
    return [
        *_measured("traced", SHIPPED / "memory_traced.csv"),
        *_measured("cpu", SHIPPED / "memory_cpu.csv"),
        *(case for path in gpus for case in _measured("gpu", path)),
        *map(_published, published_runs()),
    ]


def _measured(truth: Truth, path: Path) -> Iterator[Case]:
    for run in read_memory_runs(path):
        if run.outcome != "failed":
            yield _case(truth, run)


def _case(truth: Truth, run: MemoryRun) -> Case:
    priced = _priced(run)
    job = priced.job
    return Case(
        name=f"{truth}-{_digest(run)}",
        truth=truth,
        source=f"torch {run.torch}, transformers {run.transformers}",
        code="transformers",
        model=run.model,
        family=job.facts.model_type,
        kind="allocated",
        ran=run.outcome == "completed",
        measured=run.peak_allocated_bytes if run.outcome == "completed" else 0,
        predicted=traced_peak(priced.memory, job) if truth == "traced" else compared(run).predicted_bytes(),
        states_measured=run.step_bytes,
        used_measured=run.device_used_bytes,
        used_predicted=priced.memory.device_used_bytes,
        memory=priced.memory,
        verdict=priced.judgement.verdict,
        note="",
        job=job,
    )


def traced_peak(memory: MemoryEstimate, job: Job) -> float:
    """Return what a trace sees of a step: not its load, and not the workspace of the matrix library."""
    return max(memory.phases[name] for name in ("forward", "loss", "backward", "step")) - library_workspace(job)


def _digest(run: MemoryRun) -> str:
    """Ten characters that a row keeps wherever it stands in its file."""
    return hashlib.sha256(json.dumps(run.key).encode()).hexdigest()[:10]


def _priced(run: MemoryRun) -> Priced:
    """Return what dsplan says of a run today. A row without a config is a model of the catalogue."""
    # What runs do not name was not varied.
    chosen = {item.name: getattr(run, item.name) for item in fields(Configuration) if hasattr(run, item.name)}
    configuration = Configuration(**chosen)
    facts = facts_from_config(run.model_config, run.model) if run.config else find_model(run.model)
    cluster = measured_cluster(run.device, run.world_size, cpu=run.cpu, cores=run.cores)
    options = WorkOptions(
        seq_len=run.sequence_length,
        global_batch=run.global_batch_size,
        precision=configuration.precision,
        optimizer=configuration.optimizer,
        attention=configuration.attention,
        max_memory_gb=run.memory_limit_bytes / 1e9 or None,
    )
    return price(make_request(facts, cluster, options), configuration)


def _published(run: PublishedRun) -> Case:
    memory, verdict = run.predicted()
    request = run.request
    job = Job(
        facts=request.facts,
        counts=request.counts,
        workload=request.workload,
        cluster=request.cluster,
        configuration=run.configuration,
    )
    return Case(
        name=run.case,
        truth="published",
        source=run.source,
        code=run.code,
        model=run.model,
        family=run.code,
        kind=run.kind,
        ran=run.ran,
        measured=run.memory_bytes,
        predicted=predicted_bytes(memory, run.kind),
        states_measured=0,
        used_measured=0,
        used_predicted=memory.device_used_bytes,
        memory=memory,
        verdict=verdict,
        note=run.assumed,
        job=job,
    )
