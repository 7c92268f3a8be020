"""Timing of one operation: warm-up, repeats, median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_WARM_UP = 2
_MIN_REPEATS = 3
_MAX_REPEATS = 20


def median_seconds(operation: Callable[[], object], device: torch.device, *, budget_seconds: float) -> float:
    """Median seconds of `operation` on `device`, over three to twenty repeats within about `budget_seconds`.

    The device is waited for before and after each repeat: what is timed is the work, not its launch.
    """
    for _ in range(_WARM_UP):
        operation()
    samples: list[float] = []
    deadline = time.perf_counter() + budget_seconds
    while len(samples) < _MIN_REPEATS or (time.perf_counter() < deadline and len(samples) < _MAX_REPEATS):
        _wait(device)
        start = time.perf_counter()
        operation()
        _wait(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
