"""`dsplan estimate --exact`: the plan of one configuration with the memory that a trace of its step found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dsplan.exact.ask import AGREEMENT, Tracing, ask
from dsplan.exact.cache import trace_versions
from dsplan.exact.reading import Reading, Refusal, Sizes
from dsplan.exact.source import ModelSource
from planner.cost.code_bases import code_base
from planner.cost.generation import engine_bytes
from planner.cost.memory.activations.instants import instants_of
from planner.cost.memory.allocator import FRAGMENTATION
from planner.cost.memory.estimate import composed, phases_of
from planner.cost.memory.ledger import Ledger, bytes_at
from planner.cost.memory.overhead import FRAGMENTATION_UPPER, closed_form_margin, library_workspace
from planner.cost.memory.rollout import with_traced
from planner.cost.precision import recipe_of
from planner.cost.timing import step_time
from planner.search.estimate import Priced, judge_job, plan_of, require_possible
from planner.search.request import Request
from planner.types.job import Job
from planner.types.plan import Configuration, Plan
from planner.vocabulary import SCALED_PRECISIONS
from strategies.tracing import is_traced_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """`job` is the step that is traced, or None if there is none; `partly` whether only its activations are taken.

    `remark` says in one line what the trace leaves to the closed forms; empty where it leaves nothing.
    """

    job: Job | None
    partly: bool = False
    remark: str = ""


def coverage_of(job: Job) -> Coverage:
    """Return how a traced step covers the asked one: as a whole, or only its activations, without offload."""
    wanted = job.configuration
    beyond = _beyond_traces(job)
    if beyond:
        remark = f"the trace does not cover {beyond}; the closed form is used, with a wider bound"
        return Coverage(job=None, remark=remark)
    if own := _not_transformers(job):
        return Coverage(job=None, remark=f"the trace does not cover {own}; the closed form is used, with a wider bound")
    if wanted.precision in SCALED_PRECISIONS:
        remark = f"the trace does not cover {wanted.precision} products; the closed form is used, with a wider bound"
        return Coverage(job=None, remark=remark)
    if is_traced_whole(job):
        return Coverage(job=job)
    what = wanted.strategy if wanted.offload == "none" else f"{wanted.strategy} with --offload {wanted.offload}"
    remark = f"the trace does not run {what}: its activations are traced, its states and buffers are closed forms"
    kept = replace(wanted, offload="none", offload_ratio=1.0)
    return Coverage(job=replace(job, configuration=kept), partly=True, remark=remark)


def _not_transformers(job: Job) -> str:
    """Return what is asked for that transformers' modules in eager torch, which are traced, do not do."""
    work = job.workload
    if not code_base(work.code).name.startswith("transformers"):
        return f"--code {work.code}"
    return "--compile" if work.compile else ""


def _beyond_traces(job: Job) -> str:
    """Return the first part of a configuration that the tracer does not run; empty where it runs all."""
    wanted = job.configuration
    whole_only = (wanted.zero_stage or wanted.offload != "none") and not is_traced_whole(job)
    more = "".join(f" x {name} {n}" for name, n in (("cp", wanted.cp), ("ep", wanted.ep)) if n > 1)
    beyond = {
        f"--pp-schedule {wanted.pp_schedule}": wanted.pp > 1 and wanted.pp_schedule == "zero-bubble",
        f"--recompute-modules {wanted.recompute_modules}": wanted.recompute_modules != "",
        f"tp {wanted.tp} x pp {wanted.pp}{more} beside ZeRO or offload": whole_only and wanted.splits_model,
    }
    return next((name for name, is_asked in beyond.items() if is_asked), "")


TRACED_MARGIN = FRAGMENTATION
"""What the upper bound adds to a traced peak: what the allocator cannot use. Closed forms add how far they may lie
below the truth; a trace misses no tensor."""
UNPROVEN = 0.08
"""What it adds to a closed form, beside that form's own margin, where a trace was asked for and there is none: the
largest difference from a trace that the closed forms of known architectures are allowed (docs/how-to/exact.md)."""


def traced_estimate(
    request: Request,
    configuration: Configuration,
    source: ModelSource,
    tracing: Tracing,
    without: Callable[[], Request] | None = None,
) -> Plan:
    """Return the plan with traced memory, or the closed form's with a wider bound where the module cannot be followed.

    `without` asks, for that, what takes time to know of a module of the user's own.

    Raises:
        ContradictoryRequest: as `planner.search.estimate.require_possible`.
        DsplanError: torch or transformers is missing, or has no such model.
    """
    priced = require_possible(request, configuration)
    coverage = coverage_of(priced.job)
    answer = ask(coverage.job, source, tracing) if coverage.job is not None else None
    if answer is None or isinstance(answer, Refusal):
        reason = f"trace: {answer.reason}; the closed form is used, with a wider bound" if answer else coverage.remark
        estimated = _unproven(require_possible(without(), configuration) if without else priced, reason)
    else:
        estimated = _traced(priced, coverage, answer)
    if tracing.cache.problem:
        estimated = replace(estimated, notes=(*estimated.notes, f"traces are not kept: {tracing.cache.problem}"))
    return plan_of(estimated, step_time(estimated.job))


def _traced(priced: Priced, coverage: Coverage, reading: Reading) -> Priced:
    job = priced.job
    closed, workspace = phases_of(job), Ledger(temporaries=library_workspace(job))
    if coverage.partly:
        phases, margin = _correct(job, closed, reading.phases), FRAGMENTATION_UPPER
    else:
        seen = {name: ledger + workspace for name, ledger in reading.phases.items()}
        # What the allocator does not split off a block is in use as well.
        for name, peak in reading.reserved.items():
            seen[name] += Ledger(temporaries=max(peak.allocated - seen[name].total, 0.0))
        # Loading, generation, evaluation and saving are not part of a step.
        phases = with_traced(job, closed, seen) if job.workload.generates else {**closed, **seen}
        margin = TRACED_MARGIN
    peaks = reading.reserved.items()
    reserved = round(max((peak.reserved + engine_bytes(job, name) for name, peak in peaks), default=0))
    memory = composed(job, phases, margin + (AGREEMENT if reading.taken_from else 0.0), reserved)
    off = priced.memory.peak_allocated_bytes / memory.peak_allocated_bytes - 1
    distance = "" if job.facts.kind == "custom" and not job.facts.traced else _distance(off)
    notes = (_what_was_traced(job, reading, partly=coverage.partly) + distance, coverage.remark)
    return replace(
        priced,
        memory=memory,
        judgement=judge_job(job, memory, priced.experience),
        memory_source="traced",
        notes=tuple(note for note in notes if note),
    )


def _correct(job: Job, closed: Mapping[str, Ledger], seen: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return closed forms whose activations are off as much as their largest ones are off those of a trace."""
    largest: dict[str, float] = {}
    for instant in instants_of(job, recipe_of(job)):
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
    return replace(priced, memory=memory, judgement=judge_job(priced.job, memory, priced.experience), notes=(note,))


def _what_was_traced(job: Job, reading: Reading, *, partly: bool) -> str:
    what = "activations are" if partly else "memory is"
    versions = trace_versions(job.workload.task)
    by = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl") if versions.get(name))
    if reading.taken_from:
        return f"{what} extrapolated from traces at {_sizes(reading)} ({by})"
    ranks = job.configuration.world_size
    rank = f" on rank 0 of {ranks}" if ranks > 1 else ""
    return f"{what} a trace of one step of {job.facts.architecture}{rank} ({by})"


def _sizes(reading: Reading) -> str:
    """Name the sizes that the traces behind an extrapolated reading differ in: `micro-batch 2 and 4`."""
    traced, wanted = reading.taken_from, reading.sizes
    by_samples = any(sizes.micro_batch != wanted.micro_batch for sizes in traced)
    numbers = [str(_size(sizes, by_samples=by_samples)) for sizes in traced]
    return f"{'micro-batch' if by_samples else 'sequence length'} {', '.join(numbers[:-1])} and {numbers[-1]}"


def _size(sizes: Sizes, *, by_samples: bool) -> int:
    return sizes.micro_batch if by_samples else sizes.sequence


def _distance(off: float) -> str:
    if abs(off) < 0.0005:
        return "; the closed form agrees"
    return f"; the closed form is {abs(off):.1%} {'above' if off > 0 else 'below'} it"
