"""Time of one optimizer step, from FLOPs, bytes, links and a few named constants."""

from planner.cost.timing.rollout import step_time
from planner.cost.timing.step import throughput

__all__ = ["step_time", "throughput"]
