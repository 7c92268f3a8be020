"""Time of one optimizer step, from FLOPs, bytes, links and a few named constants."""

from planner.cost.timing.step import step_time, throughput

__all__ = ["step_time", "throughput"]
