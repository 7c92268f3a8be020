"""Traces of chosen steps, as the config's `profiler` asks: a file per rank that Perfetto or chrome://tracing opens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from hardware_db.files import replacement
from strategies.config.values import ProfilerSection
from strategies.protocols import Observer
from strategies.torch_compat.profiling import DeviceType, profiler_enabled

Interval = tuple[int, int]


_SILENT = "6"
"""Of kineto's levels: above the lines with which it marks where each profile begins and ends, on standard error."""


def profile_of(device: torch.device, **options: Any) -> torch.profiler.profile:
    """Make a profile of what a device does, and have kineto write nothing of it unless its user has asked for that."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)  # read when the first profile of a process begins
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    return torch.profiler.profile(activities=activities, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationTime:
    """Seconds of one step in which something was sent or received, and those in which nothing was computed then."""

    seconds: float
    exposed_seconds: float


class StepProfile:
    """A profile of what a strategy sends and computes between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._profile = profile_of(device)

    @staticmethod
    def is_possible() -> bool:
        """Return whether no other profile is running; there can be one at a time."""
        return not profiler_enabled()

    def start(self) -> None:
        """Begin to record."""
        self._profile.start()

    def stop(self) -> CommunicationTime:
        """End the profile and read it."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        results: Any = self._profile.profiler
        return communication_time(results.kineto_results.events(), on_gpu=self._on_gpu)


def communication_time(events: Iterable[Any], *, on_gpu: bool) -> CommunicationTime:
    """Sum up the communication in a profile: NCCL's kernels on a GPU, gloo's transfers between CPU ranks.

    What computes are the other kernels there, and torch's operators here.
    """
    sent: list[Interval] = []
    computed: list[Interval] = []
    for event in events:
        name = event.name()
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        if on_gpu:
            if event.device_type() == DeviceType.CUDA and not name.startswith(("Mem", "gpu_")):
                (sent if name.startswith("nccl") else computed).append(interval)
        elif name.startswith("gloo:"):
            sent.append(interval)
        elif name.startswith("aten::"):
            computed.append(interval)
    busy, working = merge(sent), merge(computed)
    total = sum(end - start for start, end in busy)
    return CommunicationTime(seconds=total / 1e9, exposed_seconds=(total - overlap(busy, working)) / 1e9)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same moments as intervals that are sorted and do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Return how long two lists of merged intervals run at the same time."""
    total = index = 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        for other_start, other_end in second[index:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total


class Traces(Observer):
    """Profiles `active` steps once, after `wait` steps that are not watched and `warmup` that are dropped."""

    def __init__(self, section: ProfilerSection, device: torch.device, rank: int) -> None:
        self._section, self._rank = section, rank
        self._profile: torch.profiler.profile | None = profile_of(
            device,
            schedule=torch.profiler.schedule(wait=section.wait, warmup=section.warmup, active=section.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._started = False

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Begin with the first step's forward pass."""
        if self._profile is not None and not self._started:
            self._profile.start()
            self._started = True

    def step_ended(self) -> None:
        """Let the profiler count the step."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """End the profile: a run that ends early leaves what was watched so far."""
        profile, self._profile = self._profile, None
        if profile is not None and self._started:
            profile.stop()

    def _write(self, profile: Any) -> None:
        directory = Path(self._section.output_path)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"trace-rank{self._rank}.json"
        with replacement(path) as temporary:
            profile.export_chrome_trace(str(temporary))
