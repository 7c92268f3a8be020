"""The reports of an engine: observers, sections by name, memory, scalars; and what scripts call without an engine."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strategies.errors import CannotRun
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.memory_report import MemoryReport, memory_report
from strategies.telemetry.memory_timeline import memory_timeline
from strategies.telemetry.tensorboard_log import scalar_log
from strategies.telemetry.timers import Section

_newest: weakref.ref[TrainingEngine] | None = None
"""For `profile` and `MemoryProfiler`, which scripts call without an engine; everything else is handed one."""


class Telemetry(Observer):
    """Reports of an engine's training: its observers, to all of which each event goes, and calls like `memory_report`.

    The engine holds it and it must not hold the engine: in a cycle, the weights of an engine that the script gave up
    would stay until Python collects them.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self.observers: list[Observer] = []
        self.counted_peak_bytes: int | None = None
        global _newest
        self._reference = _newest = weakref.ref(engine)

    def profile(self, name: str) -> AbstractContextManager[None]:
        """Name a section, in traces and, where timers run, in the times that are printed."""
        return Section(self.observers, name)

    def memory_report(self) -> MemoryReport:
        """Return the bytes of this rank's tensors, beside the plan's prediction."""
        return memory_report(self._engine)

    def memory_profile(self) -> MemoryReport:
        """Return `memory_report`, which rank 0 prints."""
        report = self.memory_report()
        if self._engine.is_main:
            print(report, flush=True)
        return report

    def memory_timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Draw this rank's memory over the steps that are made inside."""
        return memory_timeline(self._engine, path)

    def set_tensorboard_writer(self, writer: Any, *, every: int) -> None:
        """Write scalars of every so many steps to rank 0's writer, which stays the script's to close.

        Raises:
            CannotRun: it is no such writer, or `every` steps are below 1.
        """
        log = scalar_log(self._engine, writer, every=every)
        if self._engine.is_main:
            self.observers.append(log)
            atexit.register(self.close)

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Pass on that a training forward pass begins."""
        for observer in self.observers:
            observer.forward_starts(module, inputs)

    def loss_is(self, loss: torch.Tensor) -> None:
        """Pass on a loss before its backward pass."""
        for observer in self.observers:
            observer.loss_is(loss)

    def step_ended(self) -> None:
        """Pass on that an optimizer step is over."""
        for observer in self.observers:
            observer.step_ended()

    def close(self) -> None:
        """Let the observers finish their files; leaving Python does it too."""
        for observer in self.observers:
            observer.close()
        atexit.unregister(self.close)

    @property
    def _engine(self) -> TrainingEngine:
        engine = self._reference()
        assert engine is not None, "only the engine holds its telemetry"
        return engine


def live_engine() -> TrainingEngine | None:
    """Return the engine that this process made last, as long as the script holds it."""
    return None if _newest is None else _newest()


def profile(name: str) -> AbstractContextManager[None]:
    """Name a section of a script, as `Engine.profile` of the newest engine; before there is one, in traces alone."""
    engine = live_engine()
    return Section([] if engine is None else engine.observers, name)


class MemoryProfiler:
    """Memory of this rank by category while an engine trains.

    Args:
        engine: None is the newest of this process.

    Raises:
        CannotRun: there is no engine yet.
    """

    def __init__(self, engine: TrainingEngine | None = None) -> None:
        newest = engine or live_engine()
        if newest is None:
            raise CannotRun("MemoryProfiler: there is no engine yet; call dsplan.initialize first")
        self._engine = newest

    def profile_training(self, steps: int = 3) -> None:
        """Count the peak over the next optimizer steps, which take longer; on a GPU the allocator counts it anyway."""
        if steps < 1:
            raise CannotRun(f"profile_training: steps is {steps}; it must be at least 1")
        if self._engine.device.type != "cuda":
            self._engine.observers.append(_PeakCounter(self._engine, steps))

    def get_memory_report(self) -> MemoryReport:
        """Return what tensors take now and took at most, beside the plan's prediction; printed, it is a table."""
        return memory_report(self._engine)


class _PeakCounter(Observer):
    """Looks at all live tensors where a step has most of them: after its forward passes, and before it is made."""

    def __init__(self, engine: TrainingEngine, steps: int) -> None:
        self._engine, self._steps_left = engine, steps

    def loss_is(self, loss: torch.Tensor) -> None:
        """Look after a forward pass."""
        self._look()

    def starts(self, section: str) -> None:
        """Look before a step is made."""
        if section == "step":
            self._look()

    def step_ended(self) -> None:
        """Count the step."""
        self._steps_left -= 1

    def _look(self) -> None:
        if self._steps_left > 0:
            live = memory_report(self._engine).live_bytes
            self._engine.counted_peak_bytes = max(live, self._engine.counted_peak_bytes or 0)
