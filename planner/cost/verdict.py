"""The verdict on a priced configuration: whether it fits, and its bottleneck."""

from __future__ import annotations

from hardware_db.records import dataclass
from hardware_db.units import format_bytes
from planner import vocabulary as words
from planner.types.cluster import Cluster
from planner.types.job import Job, Workload
from planner.types.plan import MemoryEstimate, Plan, StepTime

TIGHT_ABOVE = 0.95
"""Share of the capacity from which what is needed leaves no room for a longer sample or a newer library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """`pressure` is the largest need over its limit; `reason` is empty when it keeps every margin."""

    verdict: words.Verdict
    pressure: float
    reason: str = ""

    @property
    def keeps_margins(self) -> bool:
        """True if it fits with every margin; what does not is proposed only where nothing else fits."""
        return self.verdict != "does_not_fit" and self.pressure <= 1


def device_limit(workload: Workload, cluster: Cluster) -> int:
    """Bytes that one device may use."""
    return min(cluster.capacity_bytes, workload.max_memory_bytes or cluster.capacity_bytes)


def host_limit(workload: Workload, cluster: Cluster) -> int:
    """Bytes that one node's host may use; 0 where it is not known."""
    if workload.host_memory_bytes and cluster.host_memory_bytes_per_node:
        return min(workload.host_memory_bytes, cluster.host_memory_bytes_per_node)
    return workload.host_memory_bytes or cluster.host_memory_bytes_per_node


def judge(job: Job, memory: MemoryEstimate, nvme_bytes: float = 0) -> Judgement:
    """Return what is needed on the device against its capacity, then host memory, then NVMe.

    It is tight where one real run in twenty would go beyond the capacity, or where hardly anything is left, there or on
    a host that keeps states; and where the device has what the job takes at the least, and no room for every margin.
    """
    workload, cluster = job.workload, job.cluster
    device = device_limit(workload, cluster)
    needs = [
        (memory.device_needed_bytes, device, "on the device", "the limit"),
        (memory.host_bytes_per_node, host_limit(workload, cluster), "of host memory", "a node"),
        (memory.host_load_bytes_per_node, host_limit(workload, cluster), "of host memory to load the model", "a node"),
        (round(nvme_bytes), cluster.nvme_bytes_per_node, "of NVMe", "a node"),
    ]
    worst = max(((need / limit, need, limit, what, who) for need, limit, what, who in needs if limit), default=None)
    if nvme_bytes and not cluster.nvme_bytes_per_node:
        return Judgement(verdict="does_not_fit", pressure=float("inf"), reason="no NVMe disk is known on these nodes")
    if worst is None:
        return Judgement(verdict="fits", pressure=0.0)
    pressure, need, limit, what, who = worst
    if pressure > 1:
        needed, has = _told_apart(need, limit)
        reason = f"needs up to {needed} {what}, {who} has {has}".replace("the limit has", "limit")
        elsewhere = any(need > limit for need, limit, where, _ in needs if limit and where != "on the device")
        if memory.device_least_bytes <= device and not elsewhere:
            least = f"without any margin {format_bytes(memory.device_least_bytes)}"
            return Judgement(verdict="tight", pressure=pressure, reason=f"{reason}; {least}")
        return Judgement(verdict="does_not_fit", pressure=pressure, reason=reason)
    tight = memory.device_used_upper_bytes > device or memory.device_needed_bytes > TIGHT_ABOVE * device
    on_host = host_limit(workload, cluster)
    tight = tight or 0 < TIGHT_ABOVE * on_host < memory.host_bytes_per_node
    return Judgement(verdict="tight" if tight else "fits", pressure=pressure)


def why_it_misses(plan: Plan) -> str | None:
    """Return why a plan does not fit, with the figures that decide it; None for one that fits."""
    if plan.verdict != "does_not_fit":
        return None
    # The notes of a plan begin with what `dsplan run` cannot run of it, if there is anything, then the reason.
    return plan.notes[0 if plan.runnable else 1]


_PHASES = {
    "generate": "generation",
    "reward": "rewards",
    "reference": "the reference model",
    "logprob": "log-probabilities",
    "sync": "weight sync",
}


def limited_by(time: StepTime) -> str:
    """Return the largest part of a step that keeps it from being faster, or of the round that it belongs to."""
    slowest = max(time.phases, key=lambda name: time.phases[name], default="update")
    if slowest != "update":
        return _PHASES[slowest]
    parts = {
        "compute": time.compute_seconds,
        "communication": time.exposed_communication_seconds,
        "offload": time.offload_seconds,
        "optimizer": time.optimizer_seconds,
        "pipeline bubble": time.bubble_seconds,
    }
    return max(parts, key=lambda name: parts[name])


def _told_apart(need: int, limit: int) -> tuple[str, str]:
    """Both sizes, in a smaller unit where they read the same in the usual one."""
    texts = format_bytes(need), format_bytes(limit)
    if texts[0] != texts[1]:
        return texts
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        texts = f"{need / scale:,.1f} {unit}", f"{limit / scale:,.1f} {unit}"
        if texts[0] != texts[1]:
            return texts
    return f"{need:,} B", f"{limit:,} B"
