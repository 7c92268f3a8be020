"""Memory of one configuration: a peak per phase on the busiest rank, and what the process adds to it."""

from planner.cost.memory.estimate import memory_estimate

__all__ = ["memory_estimate"]
