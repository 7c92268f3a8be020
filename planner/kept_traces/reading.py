"""Reading: what one trace of a training step found, or why it could not be followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from planner.job import Job
from planner.memory.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Sizes:
    """What traces of one series differ in: samples of a micro-batch, and positions of its sequences."""

    micro_batch: int
    sequence: int
    source: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Bytes alive on rank 0 at the peak of each phase of a step in the steady state.

    `taken_from` are the sizes of the traces that a reading was extrapolated from; empty for a trace of its own.
    """

    sizes: Sizes
    phases: Mapping[str, Ledger]
    taken_from: tuple[Sizes, ...] = field(default=())

    @property
    def peak_bytes(self) -> float:
        return max(ledger.total for ledger in self.phases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A module that the tracer cannot follow: `reason` names the operation and the part of the module, in one line."""

    sizes: Sizes
    reason: str


Answer: TypeAlias = "Reading | Refusal"


def sizes_of(job: Job) -> Sizes:
    """The sizes that a job asks for."""
    configuration, workload = job.configuration, job.workload
    return Sizes(
        micro_batch=configuration.micro_batch_size,
        sequence=configuration.sequence_length,
        source=workload.source_length,
    )


def to_document(answer: Answer) -> dict[str, object]:
    """The JSON object that the database keeps; extrapolated readings are not kept."""
    if isinstance(answer, Refusal):
        return {"sizes": asdict(answer.sizes), "refused": answer.reason}
    phases = {name: ledger.rounded() for name, ledger in answer.phases.items()}
    return {"sizes": asdict(answer.sizes), "phases": phases}


def from_document(document: Mapping[str, Any]) -> Answer:
    """The answer that such an object holds."""
    sizes = Sizes(**document["sizes"])
    if "refused" in document:
        return Refusal(sizes=sizes, reason=document["refused"])
    phases = {name: Ledger(**bytes_of) for name, bytes_of in document["phases"].items()}
    return Reading(sizes=sizes, phases=phases)
