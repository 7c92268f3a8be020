"""Whole tensors: how evenly ranks share the states of an optimizer that steps every tensor whole.

Source: `strategies/zero/partition.py` (`owners_of`) and `strategies/optimizer_needs.py`: our own ZeRO gives each tensor
to one rank, the largest first to the rank that has least.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heapreplace

from planner.job import Job
from planner.memory.zero_partition import tensors_of
from planner.plan import Configuration

_WHOLE = ("adafactor", "adamw-8bit")


def steps_whole_tensors(configuration: Configuration) -> bool:
    """Whether each tensor's states are on one rank."""
    return configuration.backend == "native" and configuration.optimizer in _WHOLE


def largest_share(job: Job) -> float:
    """The part of all elements whose states are on the rank that has most of them."""
    ranks = job.configuration.dp_shard
    if ranks == 1 or not steps_whole_tensors(job.configuration):
        return 1 / ranks
    return _largest_share(tensors_of(job), ranks)


@lru_cache(maxsize=64)
def _largest_share(sizes: tuple[int, ...], ranks: int) -> float:
    loads = [0] * ranks
    heapify(loads)
    for size in sorted(sizes, reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads) / sum(sizes)
