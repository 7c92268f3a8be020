"""Training steps under fake tensors, and models read from live modules."""

from __future__ import annotations

from planner.cost.memory.zero.partition import steps_whole_tensors
from planner.types.job import Job


def is_traced_whole(job: Job) -> bool:
    """Return whether a trace has all of a job's step: of replicas, FSDP2, and our own ZeRO on GPUs, plainly trained.

    With what is offloaded to host memory, where nothing but data parallelism splits the job. Of DeepSpeed's ZeRO it has
    the activations.
    """
    chosen, on_cpu = job.configuration, job.cluster.device.is_cpu
    offloads = chosen.offload != "none"
    if offloads and (on_cpu or chosen.offload == "nvme" or chosen.splits_model):
        return False
    if not chosen.zero_stage:
        return True
    is_plain = chosen.gradient_compression != "int8" and chosen.pp * chosen.cp * chosen.ep * chosen.dp_replicate == 1
    divides = not steps_whole_tensors(chosen) and not job.workload.freezes
    return chosen.backend == "native" and is_plain and divides and not on_cpu
