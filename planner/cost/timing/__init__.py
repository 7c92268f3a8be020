"""Time of one optimizer step, from FLOPs, bytes, links and a few named constants."""

from planner.cost.timing.rollout import stage_times, step_time
from planner.cost.timing.step import throughput

__all__ = ["stage_times", "step_time", "throughput"]
