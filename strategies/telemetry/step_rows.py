"""StepRows: from what an engine or a library's loop does to one row of figures per optimizer step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from strategies.telemetry.machine import ProcessMemory
from strategies.telemetry.metrics import STORAGE_TRACKER, WARM_UP_STEPS
from strategies.telemetry.timers import clock_of
from strategies.torch_compat.tensors import tree_leaves
from strategies.tracing.storage_tracker import StorageTracker

# Memory is in its steady state once the steps of the warm-up are over.
TRACKED_STEP = WARM_UP_STEPS
LOOK_SECONDS = 0.5
"""Code that runs once per step finds its caches cold: what need not be that new is done less often."""


class StepRows:
    """Collects a step's figures; `global_steps` gives the steps over all attempts, and without it they count here.

    On a GPU torch's allocator counts every step; on the CPU the storage tracker, which slows a step down, counts step 2
    alone, where `tracks`. Of samples that `sharing` ranks work on together (tp, pp, cp) each counts its share.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        sequence_length: int,
        global_steps: Callable[[], int] | None = None,
        tracks: bool = True,
        sharing: int = 1,
    ) -> None:
        self._sharing = sharing
        self._memory: _CudaMemory | _TrackedMemory = (
            _CudaMemory(device) if device.type == "cuda" else _TrackedMemory(tracks=tracks)
        )
        self._ready = _Ready(device)
        self._process = ProcessMemory()
        self._look_at, self._looked = 0.0, dict[str, int]()
        self._sequence_length = sequence_length
        self._global_steps = global_steps
        self._losses: list[torch.Tensor] = []
        self._load: float | None = None
        self._samples = self._tokens = self._steps = 0
        self._started = time.perf_counter()

    def begin(self, global_steps: Callable[[], int] | None) -> None:
        """Begin the first step; `global_steps` gives its number when it is over."""
        self._global_steps = global_steps
        self.restart_clock()

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Count the micro-batch and, at the start of a step, begin to measure its memory."""
        if not self._losses:
            if self._load is None:
                self._load = time.perf_counter() - self._started
            self.memory_starts(chain(module.parameters(), module.buffers()))
        samples, tokens = _count(inputs, self._sequence_length)
        self._samples += samples
        self._tokens += tokens

    def memory_starts(self, weights: Iterable[torch.Tensor]) -> None:
        """Begin to measure the memory of a step, in which `weights` are there from the start."""
        self._memory.step_starts(self._steps, weights)

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss; it stays on the device until the step ends."""
        if not self._losses:
            self._ready.loss_is()
        self._losses.append(loss.detach())

    def step_ended(self, global_step: int | None = None) -> dict[str, Any]:
        """Return the row of the step that is over, the `global_step`th over all attempts."""
        loss = _mean(self._losses)  # waits for the device, which makes the clock below tell the truth
        now = time.perf_counter()
        row = {
            "event": "step",
            "step": self._steps,
            "global_step": self._count_steps() if global_step is None else global_step,
            "loss": loss,
            "seconds": now - self._started,
            "load_seconds": self._load,
            "ready_seconds": self._ready.seconds(),
            "samples": self._share(self._samples),
            "tokens": self._share(self._tokens),
            **self._memory.step_ended(),
            **self._process_memory(now),
        }
        self._steps += 1
        self._losses, self._load = [], None
        self._samples = self._tokens = 0
        self.restart_clock()
        return row

    def restart_clock(self) -> None:
        """Begin the next step only now: what was done since the last one ended was no part of it."""
        self._started = time.perf_counter()  # before the device's: what it measures is a part of the step
        self._ready.step_starts()

    def _share(self, count: int) -> float:
        return count / self._sharing if count % self._sharing else count // self._sharing

    def close(self) -> None:
        """Stop to measure memory."""
        self._memory.step_ended()

    def _process_memory(self, now: float) -> dict[str, int]:
        """Return the process's memory, as it was at most `LOOK_SECONDS` ago."""
        if now >= self._look_at:
            self._look_at, self._looked = now + LOOK_SECONDS, self._process.read()
        return self._looked

    def _count_steps(self) -> int:
        return self._steps + 1 if self._global_steps is None else self._global_steps()


class _Ready:
    """Time at which the step's first loss was there, by the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self.step_starts()

    def step_starts(self) -> None:
        self._began: Any = self._clock.now()
        self._loss: Any = None

    def loss_is(self) -> None:
        self._loss = self._clock.now()

    def seconds(self) -> float | None:
        """Return seconds from the start of the step to the loss; the device has been waited for."""
        return None if self._loss is None else self._clock.seconds(self._began, self._loss)


class _CudaMemory:
    """Allocator statistics of one GPU, per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def step_starts(self, step: int, weights: Iterable[torch.Tensor]) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def step_ended(self) -> dict[str, Any]:
        # One look: `memory_allocated` and its like each flatten hundreds of figures for the one that they return.
        figures = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (figures.get(f"{kind}_bytes", {}).get("all", {}) for kind in ("allocated", "reserved"))
        return {
            "allocated_bytes": allocated.get("current", 0),
            "reserved_bytes": reserved.get("peak", 0),
            "peak_bytes": allocated.get("peak", 0),
            "measured_by": "cuda",
        }


class _TrackedMemory:
    """The storage tracker around one step, nothing around the others."""

    def __init__(self, *, tracks: bool = True) -> None:
        self._tracks = tracks
        self._tracker: StorageTracker | None = None

    def step_starts(self, step: int, weights: Iterable[torch.Tensor]) -> None:
        if self._tracks and step == TRACKED_STEP:
            self._tracker = StorageTracker(list(weights))
            self._tracker.__enter__()

    def step_ended(self) -> dict[str, Any]:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_bytes", "measured_by"))
        measured = {"allocated_bytes": tracker.live_bytes, "reserved_bytes": None, "peak_bytes": tracker.peak_bytes}
        tracker.__exit__(None, None, None)
        return {**measured, "measured_by": STORAGE_TRACKER}


def _mean(losses: list[torch.Tensor]) -> float | None:
    if not losses:
        return None
    if len(losses) == 1:
        return float(losses[0].item()) if losses[0].dim() == 0 else losses[0].float().mean().item()
    return torch.stack([loss.float() for loss in losses]).mean().item()


def _count(inputs: tuple[Any, Mapping[str, Any]], sequence_length: int) -> tuple[int, int]:
    """Count samples and tokens of a micro-batch: its first tensor's rows, and its elements if these are token ids."""
    positional, named = inputs
    first = next((item for item in (*positional, *named.values()) if _is_batch(item)), None)
    if first is None:  # deeper inside, where looking takes longer
        first = next((leaf for leaf in tree_leaves(inputs) if _is_batch(leaf)), None)
    if first is None:
        return 0, 0
    shape = first.shape
    is_ids = len(shape) == 2 and not first.dtype.is_floating_point
    return shape[0], shape[0] * (shape[1] if is_ids else sequence_length)


def _is_batch(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() > 0
