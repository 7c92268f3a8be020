"""The tracer's answer to a question of `dsplan.exact`: a reading, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dsplan.exact.factory import Product, call_factory
from dsplan.exact.reading import Answer, Reading, Refusal, sizes_of
from dsplan.exact.source import ModelSource
from planner.cost.memory.ledger import Ledger
from planner.errors import DsplanError
from planner.types.job import Job
from strategies.tracing.step.build import Subject, own_subject, subject_of
from strategies.tracing.step.refusal import TraceFailed, guard, why_refused
from strategies.tracing.step.step import trace_step

# What `save_pretrained` writes beside the arguments of a config, and what the subject decides itself.
_NO_ARGUMENTS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "use_cache")


def trace_answer(job: Job, source: ModelSource, report: Callable[[str], None]) -> Answer:
    """Build the module without memory for its weights and trace a step of the job; `report` is called with each phase.

    Raises:
        DsplanError: the factory that makes the module fails.
    """
    sizes = sizes_of(job)
    product = call_factory(source.factory) if source.factory else None
    try:
        with guard():
            report(f"building {source.facts.architecture} without its weights")
            subject = _subject(job, source, product)
            report(f"tracing a step of {source.facts.architecture} on fake tensors")
            step = trace_step(job, subject)
    except TraceFailed as problem:
        return Refusal(sizes=sizes, reason=why_refused(problem, subject.module))
    except DsplanError as problem:
        return Refusal(sizes=sizes, reason=str(problem))
    except Exception as problem:
        # Code of the user's own may raise anything, also where it is copied or sharded; ours has its traceback.
        if product is None:
            raise
        lines = str(problem).strip().splitlines() or ["no message"]
        name = type(product.model).__name__
        return Refusal(sizes=sizes, reason=f"{name} raised {type(problem).__name__}: {lines[0][:200]}")
    phases = {phase: {str(name): size for name, size in parts.items()} for phase, parts in step.phases.items()}
    ledgers = {phase: Ledger(**parts) for phase, parts in phases.items()}
    return Reading(sizes=sizes, phases=ledgers, reserved=step.reserved)


def _subject(job: Job, source: ModelSource, product: Product | None) -> Subject:
    attention = job.configuration.attention
    model: Any = None if product is None else product.model
    if product is not None and isinstance(model, nn.Module):
        return own_subject(model, source.facts, attention, batch=product.batch)
    config = model.to_dict() if hasattr(model, "to_dict") else model or source.config
    arguments = {name: value for name, value in config.items() if name not in _NO_ARGUMENTS}
    return subject_of(source.facts, attention=attention, task=job.workload.task, overrides=arguments)
