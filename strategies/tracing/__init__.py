"""Training steps under fake tensors, and models read from live modules."""

from __future__ import annotations

from planner.cost.memory.zero.partition import steps_whole_tensors
from planner.types.job import Job


def is_traced_whole(job: Job) -> bool:
    """Return whether a trace has all of a job's step: of replicas, FSDP2, and our own ZeRO on GPUs, plainly trained.

    Of DeepSpeed's ZeRO it has the activations, and what is on the host it does not run.
    """
    chosen = job.configuration
    if chosen.offload != "none" or not chosen.zero_stage:
        return chosen.offload == "none"
    is_plain = chosen.gradient_compression != "int8" and not chosen.splits_model and chosen.dp_replicate == 1
    divides = not steps_whole_tensors(chosen) and not job.workload.freezes
    return chosen.backend == "native" and is_plain and divides and not job.cluster.device.is_cpu
