"""Traces of chosen steps, as the config's `profiler` asks: a file per rank that Perfetto or chrome://tracing opens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from strategies.config import ProfilerSection
from strategies.protocols import Observer


class Traces(Observer):
    """Profiles `active` steps once, after `wait` steps that are not watched and `warmup` that are dropped."""

    def __init__(self, section: ProfilerSection, device: torch.device, rank: int) -> None:
        self._section, self._rank = section, rank
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profile: torch.profiler.profile | None = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=section.wait, warmup=section.warmup, active=section.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._started = False

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        if self._profile is not None and not self._started:
            self._profile.start()
            self._started = True

    def step_ended(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """A run that ends early leaves what was watched so far."""
        profile, self._profile = self._profile, None
        if profile is not None and self._started:
            profile.stop()

    def _write(self, profile: Any) -> None:
        directory = Path(self._section.output_path)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"trace-rank{self._rank}.json"
        temporary = path.with_suffix(".json.tmp")
        profile.export_chrome_trace(str(temporary))
        os.replace(temporary, path)
