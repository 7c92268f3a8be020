"""The result of tracing one training step, or why it could not be traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from dsplan.exact.source import ModelSource
from hardware_db.measurement import trace_key
from planner.cost.generation import scores_again
from planner.cost.memory.allocator import Peak
from planner.cost.memory.ledger import Ledger
from planner.types.job import Job


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Sizes:
    """Sizes in which traces of one series differ: samples of a micro-batch, and positions of its sequences."""

    micro_batch: int
    sequence: int
    source: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Bytes alive on rank 0 at the peak of each phase of a step in the steady state.

    `reserved` is what the caching allocator makes of each phase where the step was traced as a whole on a GPU's terms.
    `taken_from` are the sizes of the traces that a reading was extrapolated from; empty for a trace of its own.
    """

    sizes: Sizes
    phases: Mapping[str, Ledger]
    reserved: Mapping[str, Peak] = field(default_factory=dict)
    taken_from: tuple[Sizes, ...] = field(default=())

    @property
    def peak_bytes(self) -> float:
        """Return the peak of all phases, bytes."""
        return max(ledger.total for ledger in self.phases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A module that the tracer cannot follow: `reason` names the operation and the part of the module, in one line."""

    sizes: Sizes
    reason: str


Answer: TypeAlias = "Reading | Refusal"


def sizes_of(job: Job) -> Sizes:
    """Return the sizes that a job asks for."""
    configuration, workload = job.configuration, job.workload
    return Sizes(
        micro_batch=configuration.micro_batch_size,
        sequence=configuration.sequence_length,
        source=workload.source_length,
    )


def to_document(answer: Answer) -> dict[str, object]:
    """Return the JSON object that the database keeps; extrapolated readings are not kept."""
    if isinstance(answer, Refusal):
        return {"sizes": asdict(answer.sizes), "refused": answer.reason}
    phases = {name: ledger.rounded() for name, ledger in answer.phases.items()}
    reserved = {name: asdict(peak) for name, peak in answer.reserved.items()}
    return {"sizes": asdict(answer.sizes), "phases": phases, **({"reserved": reserved} if reserved else {})}


def from_document(document: Mapping[str, Any]) -> Answer:
    """Return the answer that such an object holds."""
    sizes = Sizes(**document["sizes"])
    if "refused" in document:
        return Refusal(sizes=sizes, reason=document["refused"])
    phases = {name: Ledger(**bytes_of) for name, bytes_of in document["phases"].items()}
    reserved = {name: Peak(**bytes_of) for name, bytes_of in document.get("reserved", {}).items()}
    return Reading(sizes=sizes, phases=phases, reserved=reserved)


# They follow from the rest, or are the sizes themselves, or say no more than whether gradients wait (see below); what
# travels is not traced.
_LEFT_OUT = frozenset(
    {"micro_batch_size", "global_batch_size", "sequence_length", "gradient_accumulation_steps", "offload_ratio"}
    | {"gradient_compression", "micro_batches"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`series` is the key of all questions that differ from this one in `sizes` only."""

    key: str
    series: str
    sizes: Sizes


def question_of(job: Job, source: ModelSource, versions: Mapping[str, str]) -> Question:
    """Return what a job asks of the tracer; of a device only the compute capability counts: it decides the kernels."""
    configuration = {name: value for name, value in asdict(job.configuration).items() if name not in _LEFT_OUT}
    if job.configuration.offload != "none":
        configuration["offload_ratio"] = job.configuration.offload_ratio
    if not job.configuration.activations_on_host:
        del configuration["activations_on_host"]  # traces that are older than it
    if not job.configuration.recompute_modules:
        del configuration["recompute_modules"]  # the same
    if not job.configuration.layers_per_stage:
        del configuration["layers_per_stage"]  # the same
    if not job.configuration.zero_plus_text:
        for name in ("hpz_partition_size", "quantized_weights", "quantized_gradients"):
            del configuration[name]  # the same
    if job.configuration.pp > 1:
        configuration["micro_batches"] = job.configuration.gradient_accumulation_steps
    document: dict[str, object] = {
        "model": source.identity,
        "configuration": configuration,
        "accumulates": job.configuration.gradient_accumulation_steps > 1,
        "task": job.workload.task,
        **_training_code(job),
        "device": "cpu" if job.cluster.device.is_cpu else job.cluster.device.compute_capability,
        "versions": dict(versions),
    }
    sizes = sizes_of(job)
    return Question(key=trace_key({**document, "sizes": asdict(sizes)}), series=trace_key(document), sizes=sizes)


def _training_code(job: Job) -> dict[str, object]:
    """Return what the code does that makes other tensors; nothing where it trains all weights with a plain loss."""
    work = job.workload
    adapters = {name: getattr(work, name) for name in ("method", "lora_rank", "lora_targets", "load_dtype")}
    loss = {"loss": work.loss} if work.loss != "plain" else {}
    return (adapters if work.method != "full" else {}) | loss | _round(job)


def _round(job: Job) -> dict[str, object]:
    """Return what post-training adds to a step: which tokens are scored, and by which models."""
    post = job.workload.post
    if post is None:
        return {}
    lengths = {"prompt_length": post.prompt_length, "completion_max": post.completion_max}
    again = job.workload.generates and scores_again(job)
    return {**lengths, "has_reference": job.has_reference, "scores_again": again}
