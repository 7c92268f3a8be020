"""The observers that a script's config asks for."""

from __future__ import annotations

import atexit
from functools import partial
from pathlib import Path

from strategies.config.values import ScriptConfig
from strategies.engine.base import Engine
from strategies.engine.checkpoint_manager import saves_of_config
from strategies.telemetry.memory_report import MemoryPrinter
from strategies.telemetry.monitor import RunMonitor
from strategies.telemetry.tensorboard_log import (
    EVERY_STEPS,
    Console,
    CsvWriter,
    MetricsWriter,
    StepLog,
    TensorboardWriter,
    Writer,
)
from strategies.telemetry.traces import Traces
from strategies.telemetry.training_monitor import TrainingMonitor


def watch(engine: Engine, script: ScriptConfig, monitor: RunMonitor | None) -> None:
    """Give an engine the observers of its config: logs, timers, traces, memory.

    Raises:
        BackendMissing: TensorBoard is not installed.
    """
    rank, every = engine.environment.rank, script.steps_per_print or EVERY_STEPS
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
        atexit.register(engine.telemetry.close)


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
