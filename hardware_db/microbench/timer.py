"""Timing of one operation on every rank at once: warm-up, samples of many calls, median and spread.

A sample is a batch of calls without a pause, long against the time slices of an operating system: where ranks share
processor cores, a single short call would show the speed of a core that happens to be free. Every rank makes the same
number of calls, which the ranks agree on, so that collectives can be timed and what is shared stays shared to the end.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hardware_db.records import dataclass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What the types that points name are to torch."""
_MOST_CALLS = 2000
_LONG_CALL_SECONDS = 0.5
_SAMPLES_OF_LONG_CALLS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time to measure one operation for.

    About `seconds` after the warm-up, in at least `least_samples` samples of about `sample_seconds`. An operation that
    is longer than a sample is called once in each, and twice in all where it takes more than half a second.
    """

    seconds: float = 0.15
    sample_seconds: float = 0.025
    least_samples: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call: the median over `repeats` samples, which differ by up to `spread` (max / min - 1)."""

    seconds: float
    repeats: int
    spread: float


def time_calls(
    operation: Callable[[], object], device: torch.device, budget: Budget, *, collective: bool = False
) -> Timing:
    """Time `operation` on `device`; all ranks of the live process group call this together.

    A collective takes as long as its slowest rank. Other work counts with the mean of ranks that share processors, and
    with the slowest of those that have a GPU each, for whom everybody waits.
    """
    calls, samples = _counts(_warm_up(operation, device), budget)
    seconds = [_sample(operation, calls, device) for _ in range(samples)]
    together = _slowest if collective or device.type == "cuda" else _mean
    seconds = together(seconds, device)
    return Timing(seconds=statistics.median(seconds) / calls, repeats=samples, spread=max(seconds) / min(seconds) - 1)


def ranks_at_work() -> int:
    """Return the size of the live process group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _warm_up(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the slowest rank's on every rank, once caches, lazy handles and connections are there."""
    operation()
    seconds = _slowest([_sample(operation, 1, device)], device)[0]
    if seconds < _LONG_CALL_SECONDS:
        seconds = _slowest([_sample(operation, 1, device)], device)[0]
    return seconds


def _counts(seconds: float, budget: Budget) -> tuple[int, int]:
    """Return calls per sample, and samples, of a call that takes so long."""
    calls = min(max(1, round(budget.sample_seconds / max(seconds, 1e-7))), _MOST_CALLS)
    least = budget.least_samples if seconds < _LONG_CALL_SECONDS else _SAMPLES_OF_LONG_CALLS
    return calls, max(least, math.ceil(budget.seconds / (calls * max(seconds, 1e-7))))


def _sample(operation: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds of `calls` calls; the device is waited for before and after, so that the work counts, not its launch."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least(value: float, device: torch.device) -> float:
    """Return the least of what the ranks of the live process group have."""
    return _over_ranks([value], device, dist.ReduceOp.MIN)[0] if ranks_at_work() > 1 else value


def _slowest(values: list[float], device: torch.device) -> list[float]:
    return _over_ranks(values, device, dist.ReduceOp.MAX) if ranks_at_work() > 1 else values


def _mean(values: list[float], device: torch.device) -> list[float]:
    ranks = ranks_at_work()
    return [total / ranks for total in _over_ranks(values, device, dist.ReduceOp.SUM)] if ranks > 1 else values


def _over_ranks(values: list[float], device: torch.device, operation: dist.ReduceOp.RedOpType) -> list[float]:
    together = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(together, op=operation)
    return [float(value) for value in together.tolist()]
