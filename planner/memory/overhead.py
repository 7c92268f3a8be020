"""What a process uses beyond the tensors: context, communicators, allocator slack, host memory.

docs/cost-model.md lists the sources by the numbers in brackets; the upper figures are the largest of the same source.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware_db.units import GIB, MIB
from planner.job import Job
from planner.memory.states import States

CONTEXT_BYTES = 0.47 * GIB
"""CUDA context with lazily loaded kernels, A100, torch 2.1 [1]; 0.92 GiB loaded eagerly."""
CONTEXT_UPPER_BYTES = 0.92 * GIB
COMMUNICATOR_BYTES = 688e6
"""One NCCL communicator over more than two ranks, 4 x A100 [2]."""
COMMUNICATOR_UPPER_BYTES = 1.6e9
"""The same, largest report [2]."""
FRAGMENTATION = 0.05
"""Reserved over allocated: what compressed-tensors keeps free [3]."""
FRAGMENTATION_UPPER = 0.10
"""The larger margin that Primus keeps above its estimate [3]."""
CUBLAS_WORKSPACE_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
"""Workspace of one handle, allocated through torch (pytorch#120925); 8,519,680 bytes on older devices."""
CUBLAS_WORKSPACE_DEFAULT_BYTES = 8_519_680
CPU_PROCESS_BYTES = 335 * MIB
"""Resident set of a process after importing torch 2.13 and transformers 5.23 and one backward, measured on Linux."""
PINNED_ROUNDING = 1.5
"""Host memory over what was asked, as DeepSpeed's own estimator allows; pinned blocks round up to powers of two
[14]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Bytes beside the allocator, expected and largest."""

    expected: float
    upper: float


def device_overhead(job: Job) -> Overhead:
    """Context and communicators of one process; on a CPU the libraries it loads."""
    if job.cluster.device.is_cpu:
        return Overhead(expected=CPU_PROCESS_BYTES, upper=CPU_PROCESS_BYTES * (1 + FRAGMENTATION))
    communicators = _communicators(job)
    first = 1 if communicators else 0
    return Overhead(
        expected=CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES,
        upper=CONTEXT_UPPER_BYTES + first * COMMUNICATOR_UPPER_BYTES + max(communicators - 1, 0) * COMMUNICATOR_BYTES,
    )


def _communicators(job: Job) -> int:
    dims = job.configuration
    return sum(degree > 1 for degree in (dims.dp_replicate, dims.dp_shard, dims.tp, dims.pp))


def library_workspace(job: Job) -> float:
    """cuBLAS's workspace, which torch's allocator counts."""
    if job.cluster.device.vendor != "nvidia":
        return 0.0
    return CUBLAS_WORKSPACE_BYTES.get(job.cluster.device.architecture, CUBLAS_WORKSPACE_DEFAULT_BYTES)


def host_bytes(job: Job, states: States, device_used: float) -> float:
    """Host memory of one node: every local process with its libraries, and what was offloaded."""
    local_ranks = job.cluster.gpus_per_node
    if job.cluster.device.is_cpu:
        return local_ranks * device_used
    return local_ranks * (CPU_PROCESS_BYTES + states.host * PINNED_ROUNDING)
