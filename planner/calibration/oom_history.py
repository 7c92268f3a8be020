"""A plan that ran out of memory, and what it rules out."""

from __future__ import annotations

from hardware_db.records import dataclass
from hardware_db.units import format_bytes
from planner.cost.verdict import Judgement
from planner.types.cluster import Cluster
from planner.types.job import Job
from planner.types.plan import Configuration, MemoryEstimate

MORE_ROOM = 1.1
"""A GPU with so many times the free memory is another matter; a display or a driver takes less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OomRecord:
    """A configuration of the same model and work that ran out of memory on this machine.

    `peak_allocated_bytes` and `host_bytes_per_node` are what is predicted of it, the latter None if not
    recorded; `capacity_bytes` is what one device was thought to have then, or None if not known. `created_at` is when
    it ran and `id` its record in the database; both are empty for one of the run that is planned for.
    """

    configuration: Configuration
    peak_allocated_bytes: int
    host_bytes_per_node: int | None = None
    capacity_bytes: int | None = None
    created_at: str = ""
    id: str = ""

    @property
    def when(self) -> str:
        """Words for when it failed: `here on 2026-11-23`, or in this run."""
        return f"here on {self.created_at[:10]}" if self.created_at else "in this run"

    def counts_on(self, cluster: Cluster) -> bool:
        """Return whether it says anything of such devices: not where a device has more room than it had then."""
        if cluster.device.is_cpu:
            return self.counts_for(cluster.gpus, on_cpu=True)
        return self.capacity_bytes is None or cluster.capacity_bytes <= MORE_ROOM * self.capacity_bytes

    def counts_for(self, ranks: int, *, on_cpu: bool) -> bool:
        """Return whether it says anything of so many ranks on the same devices."""
        # What is free of a host changes by the minute; fewer ranks than then have more of it each.
        return not on_cpu or ranks >= self.configuration.world_size

    def rules_out(self, job: Job, memory: MemoryEstimate) -> bool:
        """Return whether a plan for these devices is this one or is predicted to take at least as much."""
        return self.counts_on(job.cluster) and self.takes_no_more_than(job.configuration, memory)

    def takes_no_more_than(self, configuration: Configuration, memory: MemoryEstimate) -> bool:
        """Return whether a plan with this memory is the one that failed or is predicted to take at least as much.

        Of a plan that offloads it is not known which memory was short, so only what takes as much of both is out; where
        what it took of the host was not recorded, it alone.
        """
        if configuration == self.configuration:
            return True
        if memory.peak_allocated_bytes < self.peak_allocated_bytes:
            return False
        if not self.configuration.uses_host:
            return True
        return self.host_bytes_per_node is not None and memory.host_bytes_per_node >= self.host_bytes_per_node

    def judgement(self, memory: MemoryEstimate) -> Judgement:
        """Return the judgement of a plan that is ruled out."""
        need, failed = memory.peak_allocated_bytes, self.peak_allocated_bytes
        reason = (
            f"is predicted at {format_bytes(need)}, and a plan predicted at {format_bytes(failed)} ran out of memory"
            f" {self.when}"
        )
        return Judgement(verdict="does_not_fit", pressure=max(need, failed) / max(failed - 1, 1), reason=reason)

    def sentence(self) -> str:
        """Return what happened, for the list of what was rejected."""
        failed = self.configuration
        kind = failed.activation_checkpointing
        recomputing = "without checkpointing" if kind == "none" else f"with {kind} checkpointing"
        forget = f"; `dsplan db forget {self.id[:8]}` allows it again" if self.id else ""
        return (
            f"ran out of memory {self.when} at micro-batch {failed.micro_batch_size} {recomputing}: nothing predicted"
            f" at {format_bytes(self.peak_allocated_bytes)} or more is proposed{forget}"
        )
