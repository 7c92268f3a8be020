"""What a run measures about itself: one line of JSON per rank and optimizer step, as `strategies/metrics.py` says.

On a GPU torch's allocator counts every step; on the CPU the storage tracker, which slows a step down, counts step 2
alone, and that step stays out of the median step time.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from planner.models.storage_tracker import StorageTracker
from strategies.launch.orders import Orders
from strategies.metrics import STORAGE_TRACKER, WARM_UP_STEPS, metrics_path, parse_row, summarise
from strategies.observer import Observer

# Memory is in its steady state once the steps of the warm-up are over.
TRACKED_STEP = WARM_UP_STEPS


class RunMonitor(Observer):
    """Writes one rank's metrics while the engine trains. `close` writes the summary; leaving Python does it too.

    Where `dsplan run` gave orders, the rows follow those of earlier attempts; elsewhere the file is new. `global_steps`
    tells the steps over all attempts once a step is over, unless `step_ended` is told; else they are counted here.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        sequence_length: int,
        global_steps: Callable[[], int] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = metrics_path(directory, rank)
        self._begin(Orders.load(directory))
        self._memory = CudaMemory(device) if device.type == "cuda" else TrackedMemory()
        self._sequence_length = sequence_length
        self._global_steps = global_steps
        self._steps = 0
        self._losses: list[torch.Tensor] = []
        self._samples = self._tokens = 0
        self._step_started = time.perf_counter()
        atexit.register(self.close)

    def _begin(self, orders: Orders | None) -> None:
        """Open the file; what a killed attempt left of a line gets an end."""
        is_cut = orders is not None and _is_cut(self._path)
        self._file: IO[str] = open(self._path, "w" if orders is None else "a")  # noqa: SIM115 - closed by close()
        if is_cut:
            self._file.write("\n")
            self._file.flush()
        self._began = self._path.stat().st_size
        if orders is not None:
            self._write({"event": "attempt", "attempt": orders.attempt})

    def plan_made(self, plan: Mapping[str, Any]) -> None:
        """Write the plan that the engine made; before any step."""
        self._write({"event": "plan", **plan})

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Count the micro-batch and, at the start of a step, begin to measure its memory."""
        if not self._losses:
            self._memory.step_starts(self._steps, module)
        samples, tokens = _count(inputs, self._sequence_length)
        self._samples += samples
        self._tokens += tokens

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss; it stays on the device until the step ends."""
        self._losses.append(loss.detach())

    def step_ended(self, global_step: int | None = None) -> None:
        """Write the row of an optimizer step, the `global_step`th over all attempts."""
        # Reading the loss waits for the device, which makes the clock below tell the truth.
        loss = torch.stack([loss.float() for loss in self._losses]).mean().item() if self._losses else None
        now = time.perf_counter()
        row = {
            "event": "step",
            "step": self._steps,
            "global_step": self._global_step() if global_step is None else global_step,
            "loss": loss,
            "seconds": now - self._step_started,
            "samples": self._samples,
            "tokens": self._tokens,
            **self._memory.step_ended(),
            "rss_bytes": psutil.Process(os.getpid()).memory_info().rss,
        }
        self._steps += 1
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
            self._write({"event": "end", **asdict(summarise([self._own_rows()]))})
            self._file.close()
        atexit.unregister(self.close)

    def _global_step(self) -> int:
        return self._steps + 1 if self._global_steps is None else self._global_steps()

    def _own_rows(self) -> list[dict[str, Any]]:
        """What this attempt wrote, read back: a long run keeps no rows in memory."""
        with self._path.open("rb") as file:
            file.seek(self._began)
            return [row for line in file if (row := parse_row(line.decode(errors="replace"))) is not None]

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _is_cut(path: Path) -> bool:
    """Whether a file ends in the middle of a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


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
