"""What a run measures about itself: one line of JSON per rank and optimizer step, as `strategies/metrics.py` says.

On a GPU torch's allocator counts every step; on the CPU the storage tracker, which slows a step down, counts step 2
alone, and that step stays out of the median step time.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from planner.models.storage_tracker import StorageTracker
from strategies.metrics import STORAGE_TRACKER, WARM_UP_STEPS, metrics_path, summarise
from strategies.observer import Observer

# Memory is in its steady state once the steps of the warm-up are over.
TRACKED_STEP = WARM_UP_STEPS


class RunMonitor(Observer):
    """Writes one rank's metrics while the engine trains. `close` writes the summary; leaving Python does it too."""

    def __init__(self, directory: Path, *, rank: int, device: torch.device, sequence_length: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = open(metrics_path(directory, rank), "w")  # noqa: SIM115 - closed by close()
        self._memory = CudaMemory(device) if device.type == "cuda" else TrackedMemory()
        self._sequence_length = sequence_length
        self._steps: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._samples = self._tokens = 0
        self._step_started = time.perf_counter()
        atexit.register(self.close)

    def plan_made(self, plan: Mapping[str, Any]) -> None:
        """Write the plan that the engine made; before any step."""
        self._write({"event": "plan", **plan})

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Count the micro-batch and, at the start of a step, begin to measure its memory."""
        if not self._losses:
            self._memory.step_starts(len(self._steps), module)
        samples, tokens = _count(inputs, self._sequence_length)
        self._samples += samples
        self._tokens += tokens

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss; it stays on the device until the step ends."""
        self._losses.append(loss.detach())

    def step_ended(self) -> None:
        """Write the row of an optimizer step."""
        # Reading the loss waits for the device, which makes the clock below tell the truth.
        loss = torch.stack([loss.float() for loss in self._losses]).mean().item() if self._losses else None
        now = time.perf_counter()
        row = {
            "event": "step",
            "step": len(self._steps),
            "loss": loss,
            "seconds": now - self._step_started,
            "samples": self._samples,
            "tokens": self._tokens,
            **self._memory.step_ended(),
            "rss_bytes": psutil.Process(os.getpid()).memory_info().rss,
        }
        self._steps.append(row)
        self._write(row)
        self._losses = []
        self._samples = self._tokens = 0
        self._step_started = time.perf_counter()

    def figures(self, row: Mapping[str, float]) -> None:
        """Write what the step log found in its last interval."""
        self._write({"event": "figures", **row})

    def close(self) -> None:
        """Write the summary and close the file; later calls do nothing."""
        if not self._file.closed:
            self._memory.step_ended()
            self._write({"event": "end", **asdict(summarise([self._steps]))})
            self._file.close()
        atexit.unregister(self.close)

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


class CudaMemory:
    """Allocator statistics of one GPU, per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def step_starts(self, step: int, module: torch.nn.Module) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def step_ended(self) -> dict[str, Any]:
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "measured_by": "cuda",
        }


class TrackedMemory:
    """The storage tracker around one step, nothing around the others."""

    def __init__(self) -> None:
        self._tracker: StorageTracker | None = None

    def step_starts(self, step: int, module: torch.nn.Module) -> None:
        if step == TRACKED_STEP:
            self._tracker = StorageTracker([*module.parameters(), *module.buffers()])
            self._tracker.__enter__()

    def step_ended(self) -> dict[str, Any]:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_bytes", "measured_by"))
        measured = {"allocated_bytes": tracker.live_bytes, "reserved_bytes": None, "peak_bytes": tracker.peak_bytes}
        tracker.__exit__(None, None, None)
        return {**measured, "measured_by": STORAGE_TRACKER}


def _count(inputs: tuple[Any, Mapping[str, Any]], sequence_length: int) -> tuple[int, int]:
    """Samples and tokens of a micro-batch: its first tensor's rows, and its elements where these are token ids."""
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
    if first is None:
        return 0, 0
    is_ids = first.dim() == 2 and not first.dtype.is_floating_point
    return first.shape[0], first.numel() if is_ids else first.shape[0] * sequence_length
