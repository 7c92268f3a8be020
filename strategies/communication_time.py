"""Seconds of communication in a step, whichever strategy makes it: read from a short profile of that step.

Collectives begin in Python, in DDP's C++ reducer, or in FSDP's hooks; torch's profiler sees all of them. Communication
is exposed while nothing is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationTime:
    """Seconds of one step in which something was sent or received, and those in which nothing was computed then."""

    seconds: float
    exposed_seconds: float


class StepProfile:
    """A profile of what happens between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self._on_gpu else [ProfilerActivity.CPU]
        self._profile = torch.profiler.profile(activities=activities)

    @staticmethod
    def is_possible() -> bool:
        """Whether no other profile is running; there can be one at a time."""
        return not torch._C._autograd._profiler_enabled()

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> CommunicationTime:
        """End the profile and read it."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        results: Any = self._profile.profiler
        return communication_time(results.kineto_results.events(), on_gpu=self._on_gpu)


def communication_time(events: Iterable[Any], *, on_gpu: bool) -> CommunicationTime:
    """Communication among a profile's events: NCCL's kernels on a GPU, gloo's transfers between CPU ranks.

    What computes are the other kernels there, and torch's operators here.
    """
    sent: list[Interval] = []
    computed: list[Interval] = []
    for event in events:
        name = event.name()
        place = (event.start_ns(), event.start_ns() + event.duration_ns())
        if on_gpu:
            if event.device_type() == DeviceType.CUDA and not name.startswith(("Mem", "gpu_")):
                (sent if name.startswith("nccl") else computed).append(place)
        elif name.startswith("gloo:"):
            sent.append(place)
        elif name.startswith("aten::"):
            computed.append(place)
    busy, working = merged(sent), merged(computed)
    total = sum(end - start for start, end in busy)
    return CommunicationTime(seconds=total / 1e9, exposed_seconds=(total - overlap(busy, working)) / 1e9)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that are sorted and do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """How long two lists of `merged` intervals run at the same time."""
    total = place = 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        for other_start, other_end in second[place:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total
