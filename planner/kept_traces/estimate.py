"""`dsplan estimate --exact`: the plan of one configuration with the memory that a trace of its step found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.estimate import Priced, judged, plan_of, possible
from planner.job import Job
from planner.kept_traces.ask import Tracing, ask
from planner.kept_traces.coverage import Coverage, coverage_of
from planner.kept_traces.extrapolate import AGREEMENT
from planner.kept_traces.reading import Reading, Refusal, Sizes
from planner.kept_traces.source import ModelSource
from planner.kept_traces.versions import trace_versions
from planner.memory.amount import bytes_at
from planner.memory.instants import instants_of
from planner.memory.ledger import Ledger
from planner.memory.overhead import FRAGMENTATION, FRAGMENTATION_UPPER, closed_form_margin, library_workspace
from planner.memory.phases import composed, phases_of
from planner.memory.recipe import recipe_of
from planner.plan import Configuration, Plan
from planner.request import Request
from planner.timing import step_time

TRACED_MARGIN = FRAGMENTATION
"""What the upper bound adds to a traced peak: what the allocator cannot use. Closed forms add how far they may lie
below the truth; a trace misses no tensor."""
UNPROVEN = 0.08
"""What it adds to a closed form, beside that form's own margin, where a trace was asked for and there is none: the
largest difference from a trace that the closed forms of known architectures are allowed (docs/exact.md)."""


def traced_estimate(request: Request, configuration: Configuration, source: ModelSource, tracing: Tracing) -> Plan:
    """The plan with traced memory; with the closed form's and a wider bound where the tracer cannot follow the module.

    Raises:
        ContradictoryRequest: as `planner.estimate.possible`.
        DsplanError: torch or transformers is missing, or has no such model.
    """
    priced = possible(request, configuration)
    coverage = coverage_of(priced.job)
    if coverage.job is None:
        found = _unproven(priced, coverage.remark)
    else:
        answer = ask(coverage.job, source, tracing)
        if isinstance(answer, Refusal):
            found = _unproven(priced, f"trace: {answer.reason}; the closed form is used, with a wider bound")
        else:
            found = _traced(priced, coverage, answer)
    if tracing.cache.problem:
        found = replace(found, notes=(*found.notes, f"traces are not kept: {tracing.cache.problem}"))
    return plan_of(found, step_time(found.job))


def _traced(priced: Priced, coverage: Coverage, reading: Reading) -> Priced:
    job = priced.job
    closed, workspace = phases_of(job), Ledger(temporaries=library_workspace(job))
    if coverage.partly:
        phases, margin = _corrected(job, closed, reading.phases), FRAGMENTATION_UPPER
    else:
        seen = {name: ledger + workspace for name, ledger in reading.phases.items()}
        # Loading, evaluation and saving are not part of a step.
        phases, margin = {**closed, **seen}, TRACED_MARGIN
    memory = composed(job, phases, margin + (AGREEMENT if reading.taken_from else 0.0))
    off = priced.memory.peak_allocated_bytes / memory.peak_allocated_bytes - 1
    notes = (_what_was_traced(job, reading, partly=coverage.partly) + _distance(off), coverage.remark)
    return replace(
        priced,
        memory=memory,
        judgement=judged(job, memory, priced.experience),
        memory_source="traced",
        notes=tuple(note for note in notes if note),
    )


def _corrected(job: Job, closed: Mapping[str, Ledger], seen: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Closed forms whose activations are off as much as their largest ones are off those of a trace."""
    largest: dict[str, float] = {}
    for instant in instants_of(job, recipe_of(job.configuration)):
        alive = bytes_at(instant.activations, job.configuration.micro_batch_size)
        largest[instant.phase] = max(largest.get(instant.phase, 0.0), alive)
    corrected = dict(closed)
    for name, activations in largest.items():
        off = seen[name].activations + seen[name].temporaries - activations
        corrected[name] = replace(closed[name], activations=max(closed[name].activations + off, 0.0))
    return corrected


def _unproven(priced: Priced, note: str) -> Priced:
    phases = phases_of(priced.job)
    margin = closed_form_margin(priced.job, max(phases.values(), key=lambda ledger: ledger.total))
    memory = composed(priced.job, phases, margin + UNPROVEN)
    return replace(priced, memory=memory, judgement=judged(priced.job, memory, priced.experience), notes=(note,))


def _what_was_traced(job: Job, reading: Reading, *, partly: bool) -> str:
    what = "activations are" if partly else "memory is"
    versions = trace_versions()
    by = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if versions[name])
    if reading.taken_from:
        return f"{what} extrapolated from traces at {_sizes(reading)} ({by})"
    ranks = job.configuration.world_size
    rank = f" on rank 0 of {ranks}" if ranks > 1 else ""
    return f"{what} a trace of one step of {job.facts.architecture}{rank} ({by})"


def _sizes(reading: Reading) -> str:
    """The sizes that the traces behind an extrapolated reading differ in: `micro-batch 2 and 4`."""
    known, asked = reading.taken_from, reading.sizes
    by_samples = any(sizes.micro_batch != asked.micro_batch for sizes in known)
    numbers = [str(_size(sizes, by_samples=by_samples)) for sizes in known]
    return f"{'micro-batch' if by_samples else 'sequence length'} {', '.join(numbers[:-1])} and {numbers[-1]}"


def _size(sizes: Sizes, *, by_samples: bool) -> int:
    return sizes.micro_batch if by_samples else sizes.sequence


def _distance(off: float) -> str:
    if abs(off) < 0.0005:
        return "; the closed form agrees"
    return f"; the closed form is {abs(off):.1%} {'above' if off > 0 else 'below'} it"
