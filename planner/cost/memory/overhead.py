"""Memory of a process beyond its tensors: the allocator's cache and fragments, the driver's context, communicators.

docs/explanation/cost-model.md lists the sources by the numbers in brackets and explains the bound. A `device` figure
without a source for its own generation is the A100's.
"""

from __future__ import annotations

from hardware_db.records import dataclass
from hardware_db.units import GIB, MIB
from planner.cost.intervals import memory_headroom
from planner.cost.memory.activations.figures import figures_of
from planner.cost.memory.allocator import CACHE, FRAGMENTATION, LEFT_WHEN_SHORT, SEGMENT_BYTES
from planner.cost.memory.host import CPU_PROCESS_BYTES
from planner.cost.memory.ledger import Ledger
from planner.cost.precision import recipe_of
from planner.cost.verdict import TIGHT_ABOVE, device_limit
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

CONTEXT_BYTES = 0.47 * GIB
"""CUDA context with lazily loaded kernels, A100, torch 2.1 [1]; 0.92 GiB loaded eagerly."""
CONTEXT_UPPER_BYTES = 0.92 * GIB
CONTEXT_UPPER_OF = {"volta": 1113 * MIB}
"""By architecture: what `nvidia-smi` showed on V100s for one tensor of one element
(bigscience-workshop/bigscience, experiments/tr3m-1B3.md)."""
COMMUNICATOR_BYTES = 688e6
"""One NCCL communicator over more than two ranks, 4 x A100 [2]."""
COMMUNICATOR_UPPER_BYTES = 1.6e9
"""The same, largest report [2]."""
CLOSED_FORM_ERROR = 0.03
"""How far a closed form may lie under a trace of the same job; docs/reference/accuracy.md has the errors measured."""
FRAGMENTATION_UPPER = FRAGMENTATION + CLOSED_FORM_ERROR
"""What is needed beyond the allocated peak of a known architecture."""
UNTRACED_ERROR = 1.0
"""Share of the activations that it adds besides for a module of which only the parameters are known: they follow a rule
of thumb, and HF models of one width differ twofold in theirs [5]."""
NEAREST_FORM_ERROR = 0.21
"""How far under a trace one case in twenty lies where a model's structure has no form of its own and the nearest one's
is taken, found by leaving the forms of their own structure out (`scripts/fit/nearest_forms.py`)."""
CUBLAS_WORKSPACE_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
"""Workspace of one handle, allocated through torch (pytorch#120925); 8,519,680 bytes on older devices."""
CUBLAS_WORKSPACE_DEFAULT_BYTES = 8_519_680


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUse:
    """Bytes on one device.

    `reserved` by torch's allocator where there is room, and `beside` it; of both together what the job takes at the
    `least`, what it `needed` with every margin, and what real runs stay below, the `upper` bound.
    """

    reserved: int
    beside: int
    least: int
    needed: int
    upper: int

    @property
    def used(self) -> int:
        """Reserved bytes and those beside them."""
        return self.reserved + self.beside


def closed_form_margin(job: Job, peak: Ledger) -> float:
    """Share of a closed form's peak that its upper bound adds."""
    if job.facts.kind != "custom" or job.facts.traced or not peak.total:
        return FRAGMENTATION_UPPER
    return FRAGMENTATION_UPPER + UNTRACED_ERROR * peak.activations / peak.total


def has_other_form(job: Job) -> bool:
    """Return whether the form in use is that of another structure, the model's own never having been traced.

    It counts as it is, with a note: most differences move little, and a bound wide enough for the rest would refuse
    every sixth published run that ran.
    """
    return bool(figures_of(job, recipe_of(job)).differences)


def device_use(job: Job, allocated: float, margin: float, engines: float = 0.0, with_room: float = 0.0) -> DeviceUse:
    """Return what a peak of allocated bytes makes of the device; `margin` is the share of it that is needed besides.

    Of them `engines` are those of engines that generate, which take what they are given and no more. `with_room` are
    the bytes that the allocator reserves where there is room, 0 where no trace says so.

    The cache grows while there is room and gives way to what is asked for; it is counted up to where so little is left
    that the device would be called tight.
    """
    if job.cluster.device.is_cpu:
        # No allocator keeps a cache here, and real ranks stayed within the margin (docs/reference/accuracy.md).
        process = round(allocated * (1 + margin) + CPU_PROCESS_BYTES)
        return DeviceUse(
            reserved=round(allocated), beside=CPU_PROCESS_BYTES, least=process, needed=process, upper=process
        )
    communicators = _communicators(job)
    first = 1 if communicators else 0
    beside = round(_beside(communicators))
    context = CONTEXT_UPPER_OF.get(job.cluster.device.architecture, CONTEXT_UPPER_BYTES)
    largest = context + first * COMMUNICATOR_UPPER_BYTES + max(communicators - 1, 0) * COMMUNICATOR_BYTES
    segments, own = allocated + SEGMENT_BYTES, allocated - engines
    needed = segments + margin * own + largest
    least = segments + (LEFT_WHEN_SHORT + max(margin - FRAGMENTATION_UPPER, 0.0)) * own + beside
    most = max(needed, TIGHT_ABOVE * device_limit(job.workload, job.cluster)) - SEGMENT_BYTES
    reserved = round(min(with_room or segments + _cache(job) * own, most - beside))
    headroom, varying = memory_headroom(job), needed - engines
    cached = min((1 + headroom.roomy) * varying + engines, most + SEGMENT_BYTES)
    upper = round(max((1 + headroom.crowded) * varying + engines, cached, reserved + beside))
    return DeviceUse(
        reserved=reserved, beside=beside, least=round(min(least, needed)), needed=round(needed), upper=upper
    )


def least_use(job: Job, allocated: float) -> float:
    """Return bytes of the device that a job takes at least whose peak of allocated bytes is so large or larger.

    It is below `least` of `device_use`, for a search that leaves out what cannot fit.
    """
    if job.cluster.device.is_cpu:
        return allocated + CPU_PROCESS_BYTES
    left = 0.0 if job.workload.generates else LEFT_WHEN_SHORT * allocated
    return allocated + SEGMENT_BYTES + left + _beside(_communicators(job))


def _beside(communicators: int) -> float:
    return CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES


def _cache(job: Job) -> float:
    configuration = job.configuration
    if configuration.strategy in FSDP_STRATEGIES:
        return CACHE["fsdp"]
    return CACHE["zero" if configuration.zero_stage else "replica"]


def _communicators(job: Job) -> int:
    dims = job.configuration
    return sum(degree > 1 for degree in (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.pp, dims.ep))


def library_workspace(job: Job) -> float:
    """Return cuBLAS's workspace, which torch's allocator counts."""
    if job.cluster.device.vendor != "nvidia":
        return 0.0
    return CUBLAS_WORKSPACE_BYTES.get(job.cluster.device.architecture, CUBLAS_WORKSPACE_DEFAULT_BYTES)
