"""What a run measures about itself: one line of JSON per rank and optimizer step.

`metrics-rank{N}.jsonl` in the directory that `DSPLAN_RUN_DIR` names holds, in this order,

    {"event": "plan", ...}                         rank 0 only, when the engine made the plan itself
    {"event": "step", "step": i, "loss": mean over this rank's micro-batches, "seconds": since the last step ended,
     "samples": ..., "tokens": ... of this rank, "allocated_bytes": ..., "reserved_bytes": ..., "peak_bytes": ...,
     "rss_bytes": ..., "measured_by": "cuda" | "storage-tracker"}
    {"event": "end", ...RunSummary}

Memory figures are null where a step did not measure them. On a GPU torch's allocator counts every step; on the CPU the
storage tracker, which slows a step down, counts step 2 alone, and that step stays out of the median step time.
"""

from __future__ import annotations

import atexit
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch.utils._pytree import tree_leaves

from planner.models.storage_tracker import StorageTracker

RUN_DIRECTORY = "DSPLAN_RUN_DIR"
# Steps 0 and 1 pay for lazy states, bucket rebuilding and allocator growth; memory is in its steady state from 2 on.
WARM_UP_STEPS = 2
TRACKED_STEP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The figures of one rank's whole run; None where nothing was measured.

    `step_seconds` is the median over the steps after warm-up that no tracker slowed down.
    """

    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_rss_bytes: int | None = None


def metrics_path(directory: Path, rank: int) -> Path:
    """Where a rank writes its metrics."""
    return directory / f"metrics-rank{rank}.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a metrics file; a last line that a killed rank left unfinished is not one."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def summarise(steps: list[dict[str, Any]]) -> RunSummary:
    """The summary of the `step` rows of one rank."""
    if not steps:
        return RunSummary(steps=0)
    settled = [row for row in steps[WARM_UP_STEPS:] if row["measured_by"] != "storage-tracker"]
    seconds = statistics.median(row["seconds"] for row in settled) if settled else None
    return RunSummary(
        steps=len(steps),
        first_loss=steps[0]["loss"],
        last_loss=steps[-1]["loss"],
        step_seconds=seconds,
        samples_per_second=steps[-1]["samples"] / seconds if seconds else None,
        tokens_per_second=steps[-1]["tokens"] / seconds if seconds else None,
        peak_bytes=_largest(steps, "peak_bytes"),
        peak_reserved_bytes=_largest(steps, "reserved_bytes"),
        peak_rss_bytes=_largest(steps, "rss_bytes"),
    )


class RunMonitor:
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

    def close(self) -> None:
        """Write the summary and close the file; later calls do nothing."""
        if not self._file.closed:
            self._memory.step_ended()
            self._write({"event": "end", **asdict(summarise(self._steps))})
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
        return {**measured, "measured_by": "storage-tracker"}


def _count(inputs: tuple[Any, Mapping[str, Any]], sequence_length: int) -> tuple[int, int]:
    """Samples and tokens of a micro-batch: its first tensor's rows, and its elements where these are token ids."""
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)
    if first is None:
        return 0, 0
    is_ids = first.dim() == 2 and not first.dtype.is_floating_point
    return first.shape[0], first.numel() if is_ids else first.shape[0] * sequence_length


def _largest(steps: Iterable[Mapping[str, Any]], key: str) -> int | None:
    return max((row[key] for row in steps if row[key] is not None), default=None)
