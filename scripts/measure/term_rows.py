"""Traced steps of what a plan says beside its strategy as rows, and how far closed forms lie from them.

Adapters, losses, tp, sp, cp, ep, stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from statistics import median
from typing import Any

from hardware_db.measured_rows import SHIPPED, MemoryRun, read_rows, write_rows
from planner.cost.memory.overhead import library_workspace
from planner.errors import DsplanError
from planner.models.catalogue import find_model
from planner.models.facts import ModelFacts
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import price
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.types.plan import Configuration
from scripts.measure.machines import measured_cluster

ROWS = SHIPPED / "memory_terms.csv"
TERMS = (
    *("lora", "qlora", "dora", "fused loss", "chunked loss", "compile"),
    *("tp", "sp", "cp", "ep", "stages 1f1b", "stages gpipe", "stages interleaved"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TermRun(MemoryRun):
    """A traced or measured step with the fields of a plan that other rows do not name.

    `term` is what the row is there for, `ranks` the bytes of the peak on every stage of a pipeline (one number where
    there is none), separated by blanks. The phases are those of the rank on which each needs most.
    """

    KIND = "traced term"

    term: str
    code: str = "transformers"
    compile: bool = False
    loss: str = "plain"
    method: str = "full"
    lora_rank: int = 0
    lora_targets: str = ""
    load_dtype: str = ""
    cp: int = 1
    ep: int = 1
    pp_schedule: str = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    peft: str = ""
    stages_bytes: str = ""

    @property
    def stages(self) -> list[int]:
        """Bytes at the peak of each stage of a pipeline."""
        return [int(text) for text in self.stages_bytes.split()]


def read_term_runs() -> list[TermRun]:
    """Return the rows that come with dsplan."""
    return read_rows(TermRun, ROWS)


def write_term_runs(runs: Iterable[TermRun]) -> None:
    """Replace them."""
    write_rows(TermRun, ROWS, runs)


def key_of(run: TermRun) -> tuple[object, ...]:
    """Return what was asked."""
    return tuple(value for name, value in _asked_fields(run).items())


def _asked_fields(run: TermRun) -> dict[str, object]:
    left_out = {*MemoryRun.MEASURED, "outcome", "stages_bytes", "torch", "transformers", "peft", "driver", "deepspeed"}
    return {item.name: getattr(run, item.name) for item in fields(run) if item.name not in left_out}


@cache
def _facts(model: str, config: str) -> ModelFacts:
    import json

    return facts_from_config(json.loads(config), model) if config else find_model(model)


def question(run: TermRun, facts: ModelFacts | None = None) -> tuple[Request, Configuration]:
    """Return the row as `dsplan estimate` would ask it; `facts` are those of a model that no config describes."""
    full = run.method == "full"
    world = run.dp_replicate * run.dp_shard * run.cp * run.tp * run.pp
    work: dict[str, Any] = {
        "seq_len": run.sequence_length,
        "precision": run.precision,
        "optimizer": run.optimizer,
        "attention": run.attention,
        "code": run.code,
        "compile": run.compile,
        "loss": run.loss,
        "method": run.method,
        "lora_rank": None if full else run.lora_rank,
        "lora_targets": None if full else run.lora_targets,
        "load_dtype": run.load_dtype or None,
        "task": run.task,
    }
    chosen: dict[str, Any] = {name: getattr(run, name) for name in ("tp", "pp", "cp", "ep", "pp_schedule")}
    chosen |= {"virtual_stages": run.virtual_stages, "sequence_parallel": run.sequence_parallel}
    chosen |= {"strategy": run.strategy, "backend": run.backend, "checkpointing": run.activation_checkpointing}
    nodes = run.dp_replicate if run.strategy == "hsdp" else 1
    cluster = measured_cluster(run.device, world, nodes=nodes, cpu=run.cpu, cores=run.cores)
    request = make_request(facts or _facts(run.model, run.config), cluster, WorkOptions(**work))
    return exact(
        request,
        ExactOptions(micro_batch=run.micro_batch_size, grad_accum=run.gradient_accumulation_steps, **chosen),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A row with the closed form's answer, in bytes without the workspace of libraries, which no trace sees."""

    run: TermRun
    predicted_bytes: float
    phases: dict[str, float]
    refused: str = ""

    @property
    def error(self) -> float:
        """Signed: above 0 where the planner says more than the trace."""
        return self.predicted_bytes / self.run.peak_allocated_bytes - 1

    def phase_error(self, phase: str) -> float:
        """Return the share by which the prediction of a phase is off."""
        return self.phases[phase] / self.run.phases[phase] - 1


def scored(run: TermRun, facts: ModelFacts | None = None) -> Scored:
    """Ask today's planner about a row, as `question` does."""
    try:
        request, configuration = question(run, facts)
        # Traces send each rank as many tokens as it sends; plans expect the busiest one to be sent more.
        even = replace(request.workload, expert_imbalance=1.0)
        priced = price(replace(request, workload=even), configuration)
    except DsplanError as problem:
        return Scored(run=run, predicted_bytes=0.0, phases={}, refused=str(problem))
    workspace = library_workspace(priced.job)
    memory = priced.memory
    # A step's peak: traces do not load a model.
    phases = {name: memory.phases[name] - workspace for name in ("forward", "loss", "backward", "step")}
    return Scored(run=run, predicted_bytes=max(phases.values()), phases=phases)


@dataclass(frozen=True, kw_only=True, slots=True)
class TermScore:
    """The distance of the closed form of a term from the traces; shares of the traced peak."""

    term: str
    rows: int
    median: float
    worst: float
    refused: int


def scores(runs: Iterable[TermRun]) -> Iterator[TermScore]:
    """One line per term, in the order of TERMS."""
    completed = [scored(run) for run in runs if run.outcome == "completed"]
    for term in TERMS:
        rows = [row for row in completed if row.run.term == term]
        errors = [abs(row.error) for row in rows if not row.refused]
        refused = sum(bool(row.refused) for row in rows)
        if rows:
            worst, middle = (max(errors), median(errors)) if errors else (0.0, 0.0)
            yield TermScore(term=term, rows=len(rows), median=middle, worst=worst, refused=refused)
