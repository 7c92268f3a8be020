"""Asking the tracer: an earlier answer, one that follows from earlier ones, or a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import TypeAlias

from dsplan.exact.cache import TraceCache, trace_versions
from dsplan.exact.reading import Answer, Question, Reading, Sizes, from_document, question_of, to_document
from dsplan.exact.source import ModelSource
from hardware_db.measurement import trace_record
from planner.cost.memory.estimate import phases_of
from planner.cost.memory.ledger import Ledger
from planner.types.job import Job

AGREEMENT = 0.005
"""Share of a phase by which extrapolated and direct closed forms, or traces, may differ."""
FEWEST_SAMPLES = 2

Phases = Mapping[str, Ledger]
_CATEGORIES = tuple(item.name for item in fields(Ledger))
_POINTS = {"micro_batch": 2, "sequence": 3}


def extrapolated(readings: Sequence[Reading], sizes: Sizes, closed: Callable[[Sizes], Phases]) -> Reading | None:
    """Return the reading at `sizes`, or None if the traces do not allow it. `closed` gives closed forms by sizes."""
    for axis, points in _POINTS.items():
        readings_by_size = _along(axis, readings, sizes)
        target: int = getattr(sizes, axis)
        nearest = sorted(readings_by_size, key=lambda at: (abs(at - target), at))
        used, checks = nearest[:points], nearest[points:]
        if len(used) < points:
            continue
        curve = _Curve({at: readings_by_size[at].phases for at in used})
        shape = _Curve({at: closed(readings_by_size[at].sizes) for at in used})
        on_curve = all(_are_close(curve.at(at), readings_by_size[at].phases) for at in checks)
        if on_curve and _are_close(shape.at(target), closed(sizes)):
            taken_from = tuple(sorted(readings_by_size[at].sizes for at in used))
            return Reading(sizes=sizes, phases=curve.at(target), taken_from=taken_from)
    return None


def _along(axis: str, readings: Sequence[Reading], sizes: Sizes) -> dict[int, Reading]:
    """By its size along the axis, the readings that differ from `sizes` in nothing else."""
    changes = {axis: getattr(sizes, axis)}
    along = {
        getattr(reading.sizes, axis): reading for reading in readings if replace(reading.sizes, **changes) == sizes
    }
    fewest = FEWEST_SAMPLES if axis == "micro_batch" else 1
    return {at: reading for at, reading in along.items() if min(at, changes[axis]) >= fewest}


class _Curve:
    """The polynomial of least degree through the phases at some sizes (Lagrange)."""

    def __init__(self, phases_by_size: Mapping[int, Phases]) -> None:
        self._known = phases_by_size

    def at(self, size: int) -> dict[str, Ledger]:
        weights = {at: self._weight(at, size) for at in self._known}
        phases = next(iter(self._known.values()))
        return {
            name: Ledger(**{category: self._sum(weights, name, category) for category in _CATEGORIES})
            for name in phases
        }

    def _weight(self, at: int, size: int) -> float:
        weight = 1.0
        for other in self._known:
            if other != at:
                weight *= (size - other) / (at - other)
        return weight

    def _sum(self, weights: Mapping[int, float], phase: str, category: str) -> float:
        total = 0.0
        for at, weight in weights.items():
            total += weight * getattr(self._known[at][phase], category)
        return max(total, 0.0)


def _are_close(one: Phases, other: Phases) -> bool:
    """Return whether two sets of phases are the same but for rounding; phases that only one has are not compared."""
    return all(
        abs(ledger.total - other[name].total) <= AGREEMENT * other[name].total
        for name, ledger in one.items()
        if name in other
    )


Report: TypeAlias = Callable[[str], None]
"""Called with a few words on what is being done."""


def silent(_: str) -> None:
    """Report nothing, for those who do not watch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracing:
    """Means of answering: earlier answers, and who is notified of progress."""

    cache: TraceCache
    report: Report = silent


def ask(job: Job, source: ModelSource, tracing: Tracing) -> Answer:
    """Return what a step of `job` holds on rank 0.

    A trace is kept once it is whole, so an interrupted one leaves nothing.

    Raises:
        DsplanError: torch or transformers is missing, or has no such model.
    """
    question = question_of(job, source, trace_versions(job.workload.task))
    record = tracing.cache.find(question.key)
    if record is not None:
        return from_document(record.document)
    return _extrapolated(job, question, tracing.cache) or _traced(job, source, question, tracing)


def _extrapolated(job: Job, question: Question, cache: TraceCache) -> Reading | None:
    answers = (from_document(record.document) for record in cache.series(question.series))
    readings = [answer for answer in answers if isinstance(answer, Reading)]
    return extrapolated(readings, question.sizes, lambda sizes: _closed(job, sizes)) if readings else None


def _closed(job: Job, sizes: Sizes) -> Phases:
    configuration = job.configuration
    ranks = configuration.dims.data_parallel * configuration.gradient_accumulation_steps
    resized = replace(
        configuration,
        micro_batch_size=sizes.micro_batch,
        global_batch_size=sizes.micro_batch * ranks,
        sequence_length=sizes.sequence,
    )
    workload = replace(job.workload, sequence_length=sizes.sequence, source_length=sizes.source)
    return phases_of(replace(job, configuration=resized, workload=workload))


def _traced(job: Job, source: ModelSource, question: Question, tracing: Tracing) -> Answer:
    tracer = import_module("dsplan.exact.answer")
    answer: Answer = tracer.trace_answer(job, source, tracing.report)
    tracing.cache.keep(trace_record(question.key, question.series, to_document(answer)))
    return answer
