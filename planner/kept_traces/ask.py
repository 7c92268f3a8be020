"""Asking the tracer: an earlier answer, one that follows from earlier ones, or a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TypeAlias

from hardware_db.trace_record import trace_record
from planner.job import Job
from planner.kept_traces.cache import TraceCache
from planner.kept_traces.extrapolate import Phases, extrapolated
from planner.kept_traces.question import Question, question_of
from planner.kept_traces.reading import Answer, Reading, Sizes, from_document, to_document
from planner.kept_traces.source import ModelSource
from planner.kept_traces.versions import trace_versions
from planner.memory.phases import phases_of

Report: TypeAlias = Callable[[str], None]
"""Told in a few words what is being done."""


def silent(_: str) -> None:
    """The report of those who do not watch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracing:
    """How questions are answered: with which earlier answers, and who is told of progress."""

    cache: TraceCache
    report: Report = silent


def ask(job: Job, source: ModelSource, tracing: Tracing) -> Answer:
    """What a step of `job` holds on rank 0. A trace is kept once it is whole, so an interrupted one leaves nothing.

    Raises:
        DsplanError: torch or transformers is missing, or has no such model.
    """
    question = question_of(job, source, trace_versions())
    known = tracing.cache.find(question.key)
    if known is not None:
        return from_document(known.document)
    return _extrapolated(job, question, tracing.cache) or _traced(job, source, question, tracing)


def _extrapolated(job: Job, question: Question, cache: TraceCache) -> Reading | None:
    answers = (from_document(record.document) for record in cache.series(question.series))
    readings = [answer for answer in answers if isinstance(answer, Reading)]
    return extrapolated(readings, question.sizes, lambda sizes: _closed(job, sizes)) if readings else None


def _closed(job: Job, sizes: Sizes) -> Phases:
    asked = job.configuration
    ranks = asked.dims.data_parallel * asked.gradient_accumulation_steps
    resized = replace(
        asked,
        micro_batch_size=sizes.micro_batch,
        global_batch_size=sizes.micro_batch * ranks,
        sequence_length=sizes.sequence,
    )
    workload = replace(job.workload, sequence_length=sizes.sequence, source_length=sizes.source)
    return phases_of(replace(job, configuration=resized, workload=workload))


def _traced(job: Job, source: ModelSource, question: Question, tracing: Tracing) -> Answer:
    tracer = import_module("planner.trace.answer")
    answer: Answer = tracer.trace_answer(job, source, tracing.report)
    tracing.cache.keep(trace_record(question.key, question.series, to_document(answer)))
    return answer
