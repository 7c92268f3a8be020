"""What watches an engine: the observers that a config asks for, and those that a script asks for by hand."""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from strategies.config import ScriptConfig
from strategies.engine.base import Engine, live_engine
from strategies.engine.checkpoint_manager import saves_of_config
from strategies.errors import CannotRun
from strategies.protocols import Observer
from strategies.telemetry.memory_report import MemoryPrinter, MemoryReport, memory_report
from strategies.telemetry.monitor import RunMonitor
from strategies.telemetry.tensorboard_log import Console, CsvWriter, MetricsWriter, StepLog, TensorboardWriter, Writer
from strategies.telemetry.timers import Section
from strategies.telemetry.traces import Traces
from strategies.telemetry.training_monitor import TrainingMonitor

# The observers of a config.


EVERY = 10
"""Steps between lines where `steps_per_print` does not say; DeepSpeed's default."""


def watch(engine: Engine, script: ScriptConfig, monitor: RunMonitor | None) -> None:
    """Give an engine the observers of its config: logs, timers, traces, memory.

    Raises:
        BackendMissing: TensorBoard is not installed.
    """
    rank, every = engine.environment.rank, script.steps_per_print or EVERY
    before = list(engine.observers)
    writers = _writers(engine, script, monitor)
    if writers:
        times = script.wall_clock_breakdown or script.tensorboard.enabled or script.csv_monitor.enabled
        engine.observers.append(StepLog(engine, writers, every=every, times=times))
    if monitor is None and script.monitor.enabled:
        TrainingMonitor(log_interval=every, log_dir=script.monitor.output_path, alerts=script.monitor).watch(
            engine, owned=True
        )
    if script.memory_breakdown:
        engine.observers.append(MemoryPrinter(engine, every=every))
    if script.profiler.enabled:
        engine.observers.append(Traces(script.profiler, engine.device, rank))
    if saves := saves_of_config(engine):
        engine.observers.append(saves)
    if engine.observers != before:
        atexit.register(engine.close)


def _writers(engine: Engine, script: ScriptConfig, monitor: RunMonitor | None) -> list[Writer]:
    writers: list[Writer] = []
    rank = engine.environment.rank
    if script.tensorboard.enabled and engine.is_main:
        writers.append(
            TensorboardWriter.in_directory(Path(script.tensorboard.output_path, script.tensorboard.job_name))
        )
    if script.csv_monitor.enabled:
        writers.append(CsvWriter(Path(script.csv_monitor.output_path, script.csv_monitor.job_name, f"rank{rank}")))
    if engine.is_main and (script.wall_clock_breakdown or script.steps_per_print):
        writers.append(Console(partial(print, flush=True)))
    if monitor is not None and script.wall_clock_breakdown:
        writers.append(MetricsWriter(monitor))
    return writers


# Observers by hand.


def profile(name: str) -> AbstractContextManager[None]:
    """A section of a script by name, as `Engine.profile` of the newest engine; before there is one, in traces alone."""
    engine = live_engine()
    return Section([] if engine is None else engine.observers, name)


class MemoryProfiler:
    """Where the memory of this rank goes while an engine trains.

    Args:
        engine: None is the newest of this process.

    Raises:
        CannotRun: there is no engine yet.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        found = engine or live_engine()
        if found is None:
            raise CannotRun("MemoryProfiler: there is no engine yet; call dsplan.initialize first")
        self._engine = found

    def profile_training(self, steps: int = 3) -> None:
        """Count the peak over the next optimizer steps, which take longer for it; on a GPU the allocator counts it
        anyway."""
        if steps < 1:
            raise CannotRun(f"profile_training: steps is {steps}; it must be at least 1")
        if self._engine.device.type != "cuda":
            self._engine.observers.append(_PeakCounter(self._engine, steps))

    def get_memory_report(self) -> MemoryReport:
        """What tensors take now and took at most, beside the plan's prediction; printed, it is a table."""
        return memory_report(self._engine)


class _PeakCounter(Observer):
    """Looks at all live tensors where a step has most of them: after its forward passes, and before it is made."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._steps_left = engine, steps

    def loss_is(self, loss: torch.Tensor) -> None:
        self._look()

    def starts(self, section: str) -> None:
        if section == "step":
            self._look()

    def step_ended(self) -> None:
        self._steps_left -= 1

    def _look(self) -> None:
        if self._steps_left > 0:
            live = memory_report(self._engine).live_bytes
            self._engine.counted_peak_bytes = max(live, self._engine.counted_peak_bytes or 0)
