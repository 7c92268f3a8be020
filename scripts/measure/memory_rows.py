"""Measured memory beside what the planner says of the same run, for the scripts and tests that compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from hardware_db.measured_rows import EmulatedRun, MemoryRun, RunRow
from planner.cost.memory.overhead import library_workspace
from planner.cost.memory.states import states_of
from planner.cost.precision import recipe_of
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate, price
from planner.search.request import Request, WorkOptions, make_request
from planner.types.cluster import Cluster
from planner.types.job import Job
from planner.types.plan import Configuration, MemoryEstimate, Plan
from planner.vocabulary import default_backend
from scripts.measure.machines import measured_cluster
from scripts.measure.memory_grid import Case
from strategies.tracing import is_traced_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A measured run with its prediction. Where something is offloaded on a CPU both count what lies on the host."""

    run: MemoryRun
    memory: MemoryEstimate
    host_bytes: float

    def predicted_bytes(self, phase: str = "") -> float:
        """Return the peak of a phase, of the whole step without one."""
        bytes_on_device = self.memory.phases[phase] if phase else self.memory.peak_allocated_bytes
        return bytes_on_device + self.host_bytes

    def measured_bytes(self, phase: str = "") -> int:
        """Return the measured peak of a phase, of the whole step without one."""
        return self.run.phases[phase] if phase else self.run.peak_allocated_bytes

    def error(self, phase: str = "") -> float:
        """Signed: above 0 where the planner says more than was measured."""
        return self.predicted_bytes(phase) / self.measured_bytes(phase) - 1


def compared(run: MemoryRun) -> Compared:
    """Ask today's planner about a run."""
    priced = price(*question_of(run))
    return Compared(run=run, memory=priced.memory, host_bytes=_host_tensors(priced.job))


Peaks: TypeAlias = Mapping[str, float]
"""Bytes that were `requested`, `allocated` and `reserved`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedToEmulated:
    """A run on emulated cards with two predictions, which are without the workspace of cuBLAS, as the cards are.

    `closed` is that of the closed forms, which do not tell what is requested from what is allocated; `traced` that of a
    trace and the simulated allocator, None where the run is not traced as a whole.
    """

    run: EmulatedRun
    closed: Peaks
    traced: Peaks | None

    @property
    def measured(self) -> Peaks:
        """The measured peaks."""
        run = self.run
        peaks = run.peak_requested_bytes, run.peak_allocated_bytes, run.peak_reserved_bytes
        return dict(zip(PEAKS, peaks, strict=True))

    def errors(self, predicted: Peaks) -> Peaks:
        """Signed: above 0 where more is predicted than was measured."""
        return {name: predicted[name] / size - 1 for name, size in self.measured.items()}


PEAKS = ("requested", "allocated", "reserved")


def compared_to_emulated(run: EmulatedRun) -> ComparedToEmulated:
    """Ask today's planner about a run on emulated cards."""
    priced = price(*question_of(run))
    workspace, phases = library_workspace(priced.job), priced.memory.phases
    # Loading is not among what was measured.
    allocated = max(phases[name] for name in run.phases if name in phases) - workspace
    traced = run.traced_requested_bytes, run.traced_allocated_bytes, run.traced_reserved_bytes
    return ComparedToEmulated(
        run=run,
        closed=dict(zip(PEAKS, (allocated, allocated, priced.memory.peak_reserved_bytes - workspace), strict=True)),
        traced=dict(zip(PEAKS, traced, strict=True)) if all(traced) else None,
    )


def traced_emulated(run: EmulatedRun) -> EmulatedRun:
    """Return the run with what a trace of its step predicts; as it is where that has not all of the step."""
    # What only tracing needs is imported there: comparing needs no torch.
    from strategies.tracing.step.build import subject_of
    from strategies.tracing.step.step import trace_step

    job = price(*question_of(run)).job
    if not is_traced_whole(job):
        return run
    sizes = {name: value for name, value in run.model_config.items() if name != "model_type"}
    peaks = trace_step(job, subject_of(job.facts, attention=run.attention, overrides=sizes)).reserved.values()
    workspace = round(library_workspace(job))
    return replace(
        run, **{f"traced_{name}_bytes": max(getattr(peak, name) for peak in peaks) - workspace for name in PEAKS}
    )


def planned(run: MemoryRun) -> Plan:
    """Return the plan of a run, for the engine to run again."""
    return estimate(*question_of(run))


def question_of(run: RunRow) -> tuple[Request, Configuration]:
    """Return a run as a question to the planner."""
    # What runs do not name was not varied.
    chosen = {item.name: getattr(run, item.name) for item in fields(Configuration) if hasattr(run, item.name)}
    configuration = Configuration(**chosen)
    cluster = measured_cluster(run.device, configuration.world_size, cpu=run.cpu, cores=run.cores)
    return _request(run.model, run.model_config, cluster, configuration), configuration


def question(case: Case, device: str) -> tuple[Request, Configuration]:
    """Return a case as a question to the planner."""
    single = case.strategy == "single"
    configuration = Configuration(
        strategy=case.strategy,
        backend=default_backend(case.strategy),
        dp_replicate=case.world_size if single or case.strategy == "ddp" else 1,
        dp_shard=1 if single or case.strategy == "ddp" else case.world_size,
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.accumulation,
        global_batch_size=case.micro_batch * case.accumulation * case.world_size,
        sequence_length=case.length,
        precision=case.precision,
        optimizer=case.optimizer,
        attention=case.attention,
        activation_checkpointing=case.checkpointing,
        offload=case.offload,
    )
    cluster = measured_cluster(device, configuration.world_size)
    return _request(case.model, case.model_config, cluster, configuration), configuration


def _request(model: str, config: Mapping[str, Any], cluster: Cluster, configuration: Configuration) -> Request:
    options = WorkOptions(
        seq_len=configuration.sequence_length,
        global_batch=configuration.global_batch_size,
        precision=configuration.precision,
        optimizer=configuration.optimizer,
        attention=configuration.attention,
    )
    return make_request(facts_from_config(config, model), cluster, options)


def _host_tensors(job: Job) -> float:
    """Return what offload moved to the host, which on a CPU is the same memory."""
    if not job.cluster.device.is_cpu:
        return 0.0
    return states_of(job, recipe_of(job)).host
