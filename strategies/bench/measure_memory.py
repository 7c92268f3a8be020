"""The true memory of an engine's step, phase by phase: what forward, loss, backward and optimizer step reach at most.

A GPU's allocator keeps the peaks itself. On a CPU a `StorageTracker` counts every storage that an operation touches and
every tensor that Python can reach; what neither shows it, such as DDP's buckets, it meets in the step before.

The phases are those of a plan: `forward` ends when the model's last block returns, `loss` (final norm, head and loss)
when the engine's forward does; `backward` and `step` are the engine's. With accumulation each phase is the largest of
its micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psutil
import torch
from torch import nn

from strategies.engine.base import Engine
from strategies.telemetry.memory_report import reachable_tensors
from strategies.tracing.blocks import repeated_blocks
from strategies.tracing.storage_tracker import StorageTracker

PHASES = ("forward", "loss", "backward", "step")
WARM_UP_STEPS = 2
"""Optimizer states appear in the first step, DeepSpeed's traces of stage 3 and DDP's rebuilt buckets in the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes on this rank in the steady state: alive before the step, and the peak of each phase.

    `states_bytes` are alive when the last backward pass has ended: weights, gradients and optimizer states.
    `reserved_bytes` is the allocator's reservation and `device_used_bytes` what all processes use of the device
    afterwards, both 0 on a CPU; `host_bytes` is this process's resident set.
    """

    resident_bytes: int
    phases: Mapping[str, int]
    states_bytes: int = 0
    reserved_bytes: int = 0
    device_used_bytes: int = 0
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())


class Meter(Protocol):
    """Counts live bytes and the peak since `restart_peak`."""

    @property
    def live_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def restart_peak(self) -> None: ...


class CudaMeter:
    """torch's caching allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def live_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def measure_step(
    engine: Engine,
    batch: Mapping[str, torch.Tensor],
    *,
    others: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> StepMemory:
    """Train on `batch` until the state is steady, then measure one optimizer step.

    `others` says which tensors are not this engine's (a CPU process may hold some from before).
    """
    for _ in range(WARM_UP_STEPS - 1):
        _train_step(engine, batch)
    gc.collect()
    if engine.device.type != "cuda":
        tracker = StorageTracker(tensor for tensor in reachable_tensors() if not others(tensor))
        return _measured(engine, batch, tracker, tracker)
    measured = _measured(engine, batch, CudaMeter(engine.device), nullcontext())
    free, total = torch.cuda.mem_get_info(engine.device)
    reserved = torch.cuda.max_memory_reserved(engine.device)
    return replace(measured, reserved_bytes=reserved, device_used_bytes=total - free)


def _measured(
    engine: Engine, batch: Mapping[str, torch.Tensor], meter: Meter, counting: AbstractContextManager[object]
) -> StepMemory:
    with counting:
        _train_step(engine, batch)  # the last of the warm-up, in which the meter meets what lives from step to step
        resident = meter.live_bytes
        peaks = PhasePeaks(meter)
        with peaks.following(engine.module):
            _train_step(engine, batch, peaks)
    host = psutil.Process().memory_info().rss
    return StepMemory(resident_bytes=resident, phases=peaks.peaks, states_bytes=peaks.before["step"], host_bytes=host)


def _train_step(engine: Engine, batch: Mapping[str, torch.Tensor], peaks: PhasePeaks | None = None) -> None:
    """One optimizer step, the loop of HF Trainer: outputs dropped, the loss kept."""
    enter = peaks.enter if peaks is not None else lambda phase: None
    for _ in range(engine.configuration.gradient_accumulation_steps):
        enter("forward")
        loss = engine(**batch).loss
        enter("backward")
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            enter("step")
        engine.step()
    enter("")


class PhasePeaks:
    """The peak of each phase that was entered, and what was alive when one was entered last."""

    def __init__(self, meter: Meter) -> None:
        self.peaks: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.before: dict[str, int] = {}
        self._meter = meter
        self._phase = ""

    def enter(self, phase: str) -> None:
        """End the present phase and begin another; the name of the present one changes nothing."""
        if phase == self._phase:
            return
        if self._phase:
            self.peaks[self._phase] = max(self.peaks[self._phase], self._meter.peak_bytes)
        self._phase = phase
        self.before[phase] = self._meter.live_bytes
        self._meter.restart_peak()

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Find where the forward pass of the blocks ends and the loss begins."""
        blocks = repeated_blocks(module)
        hooks = [blocks[-1].register_forward_hook(self._block_returns)] if blocks else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _block_returns(self, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._phase == "forward":  # not where activation checkpointing runs it again
            self.enter("loss")
