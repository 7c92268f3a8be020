"""The key of a question to the tracer: everything that its answer depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hardware_db.trace_record import trace_key
from planner.job import Job
from planner.kept_traces.reading import Sizes, sizes_of
from planner.kept_traces.source import ModelSource

# They follow from the rest, or are the sizes themselves, or say no more than whether gradients wait (see below); what
# offloads or travels is not traced.
_LEFT_OUT = frozenset(
    {"micro_batch_size", "global_batch_size", "sequence_length", "gradient_accumulation_steps", "offload_ratio"}
    | {"gradient_compression"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`series` is the key of all questions that differ from this one in `sizes` only."""

    key: str
    series: str
    sizes: Sizes


def question_of(job: Job, source: ModelSource, versions: Mapping[str, str]) -> Question:
    """What a job asks of the tracer. Of a device only the compute capability counts, which decides the kernels."""
    configuration = {name: value for name, value in asdict(job.configuration).items() if name not in _LEFT_OUT}
    if not job.configuration.activations_on_host:
        del configuration["activations_on_host"]  # traces that are older than it
    asked: dict[str, object] = {
        "model": source.identity,
        "configuration": configuration,
        "accumulates": job.configuration.gradient_accumulation_steps > 1,
        "task": job.workload.task,
        "device": "cpu" if job.cluster.device.is_cpu else job.cluster.device.compute_capability,
        "versions": dict(versions),
    }
    sizes = sizes_of(job)
    return Question(key=trace_key({**asked, "sizes": asdict(sizes)}), series=trace_key(asked), sizes=sizes)
