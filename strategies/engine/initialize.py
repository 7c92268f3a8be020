"""`dsplan.initialize`: from a module to an engine that trains it, under whichever plan."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hardware_db.notices import notice
from planner import vocabulary as words
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.autoplan.select import PlanningOptions, another_model, describe, settled_plan
from strategies.config import ScriptConfig, read_config
from strategies.config.limits import refuse_deepspeed_keys
from strategies.config.values import MonitorSettings
from strategies.data.loader import Collate, LoaderSettings, ShardedLoader
from strategies.distributed.environment import Environment, join
from strategies.distributed.excepthook import install_excepthook
from strategies.distributed.same_model import require_same_model
from strategies.engine.base import Engine
from strategies.engine.checkpoint_manager import saves_of_config
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from strategies.optim.optimizers import fitting
from strategies.optim.registry import with_named
from strategies.protocols import OptimizerFactory, Scheduler, SchedulerFactory, TrainingParts
from strategies.run_directory.state_consensus import current
from strategies.supervision.supervision import supervise
from strategies.telemetry.memory_report import MemoryPrinter
from strategies.telemetry.monitor import RunMonitor
from strategies.telemetry.step_log import Console, CsvWriter, MetricsWriter, StepLog, TensorboardWriter, Writer
from strategies.telemetry.traces import Traces
from strategies.telemetry.training_monitor import TrainingMonitor
from strategies.variables import QUIET, RUN_DIRECTORY

if TYPE_CHECKING:
    from strategies.autoplan.tuning import Prospect

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
        writers.append(TensorboardWriter(Path(script.tensorboard.output_path, script.tensorboard.job_name)))
    if script.csv_monitor.enabled:
        writers.append(CsvWriter(Path(script.csv_monitor.output_path, script.csv_monitor.job_name, f"rank{rank}")))
    if engine.is_main and (script.wall_clock_breakdown or script.steps_per_print):
        writers.append(Console(partial(print, flush=True)))
    if monitor is not None and script.wall_clock_breakdown:
        writers.append(MetricsWriter(monitor))
    return writers


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Scheduler | SchedulerFactory | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    collate_fn: Collate | None = None,
    plan: Plan | str | Path | None = None,
    strategy: words.Strategy | None = None,
    backend: words.Backend | None = None,
) -> tuple[Engine, torch.optim.Optimizer, ShardedLoader | None, Scheduler | None]:
    """Place a model under a plan and return (engine, optimizer, dataloader, scheduler); called on every rank.

    The plan is, in this order: the file that `dsplan run --plan` hands over, `plan=`, or one made now from the module
    and this machine within what `strategy=`, `backend=` and `config=` ask for. Rank 0 prints a plan that was made now,
    unless DSPLAN_QUIET is set.

    Args:
        model: on any device, whole and with the weights to start from; rank 0's weights count.
        optimizer: an optimizer of the model's parameters, a function parameters -> optimizer, or None for the config's
            or the plan's.
        model_parameters: what a new optimizer trains (parameters or groups); None for all that require gradients.
        training_data: a dataset with a length; the dataloader returned gives this rank's micro-batches of it.
        collate_fn: makes a micro-batch of a list of samples; torch's `default_collate` where it is None.
        lr_scheduler: a scheduler of `optimizer` or a function optimizer -> scheduler; the engine steps it.
        config: a dictionary or JSON file with DeepSpeed's keys, which every strategy understands;
            docs/reference/config.md lists them. What it names, `optimizer=` and `lr_scheduler=` come before.

    Raises:
        DsplanError: what was asked for cannot be planned or run here; one line with the remedy.
    """
    install_excepthook()
    script = read_config(config)
    environment = join()
    require_same_model(model)
    options = PlanningOptions(
        plan=plan,
        strategy=strategy,
        backend=backend,
        config=script,
        optimizer=optimizer,
        training_data=training_data,
        collate=collate_fn,
    )
    settled, is_new = _settle(model, options, environment)
    refuse_deepspeed_keys(script, settled.configuration)
    parts = TrainingParts(
        model=model,
        plan=settled,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        gradient_clipping=script.gradient_clipping,
        script=script,
    )
    tuning = _tuning(model, options, environment)
    monitor = _monitor(settled, environment, script.monitor, is_new=is_new)
    engine = find_strategy(settled.configuration, environment).engine(fitting(with_named(parts)))
    engine.checkpointing = script.checkpoint
    if training_data is not None:
        read_as = LoaderSettings(section=script.data, collate=collate_fn)
        engine.dataloader = ShardedLoader(training_data, settled.configuration, environment, read_as)
    if monitor is not None:
        engine.observers.append(monitor)
        monitor.training_starts(lambda: engine.global_steps)
    watch(engine, script, monitor)
    supervise(engine)
    if tuning is not None:
        tuning.watch(engine)
    return engine, engine.optimizer, engine.dataloader, engine.lr_scheduler


def _settle(model: nn.Module, options: PlanningOptions, environment: Environment) -> tuple[Plan, bool]:
    """The plan to run, and whether it is another one than was given."""
    plan = settled_plan(model, options, environment)
    is_new = plan is None or plan is current().plan
    if plan is None:
        from strategies.autoplan.live import make_plan  # with the planner's search, which a given plan does not need

        plan = make_plan(model, options, environment)
    elif environment.is_main and (warning := another_model(plan, model)):
        notice(warning)
    if not current().is_resumed:
        _require_same_choice(plan, options.strategy, options.backend)
    return plan, is_new


def _tuning(model: nn.Module, options: PlanningOptions, environment: Environment) -> Prospect | None:
    """Return what the plan is tuned with, or None if nothing is to be tuned."""
    directory = os.environ.get(RUN_DIRECTORY)
    if not current().tunes or directory is None:
        return None
    from strategies.autoplan.tuning import prospect  # with the planner's search

    return prospect(model, options, environment, Path(directory))


def _require_same_choice(plan: Plan, strategy: str | None, backend: str | None) -> None:
    """Check the plan against what the script names beside it.

    Raises:
        CannotRun: they differ.
    """
    chosen = plan.configuration
    for word, asked, has in (("strategy", strategy, chosen.strategy), ("backend", backend, chosen.backend)):
        if asked is not None and asked != has:
            raise CannotRun(f"{word}={asked!r} was asked for and the plan has {has!r}; leave {word}= out or plan again")


def _monitor(plan: Plan, environment: Environment, settings: MonitorSettings, *, is_new: bool) -> RunMonitor | None:
    """Print a plan that was made now, or leave it and the metrics to `dsplan run`, which shows them itself."""
    directory = os.environ.get(RUN_DIRECTORY)
    if directory:
        monitor = RunMonitor(
            Path(directory),
            rank=environment.rank,
            device=environment.device,
            sequence_length=plan.configuration.sequence_length,
            settings=settings,
        )
        if is_new and environment.local_rank == 0:  # the supervisor of every node has to know it
            monitor.plan_made(plan_to_dict(plan))
        return monitor
    if is_new and environment.is_main and not os.environ.get(QUIET):
        print(describe(plan), flush=True)
    return None
