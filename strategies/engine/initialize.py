"""`dsplan.initialize`: from a module to an engine that trains it, under whichever plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hardware_db.notices import notice
from planner import vocabulary as words
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import plan_to_dict
from strategies.autoplan.select import (
    PlanningOptions,
    another_device,
    another_model,
    degrees_of,
    describe,
    planned_work,
    settled_plan,
)
from strategies.config import read_config
from strategies.config.limits import refuse_deepspeed_keys
from strategies.config.values import MonitorSettings
from strategies.data.loader import Collate, LoaderSettings, ShardedLoader
from strategies.distributed.environment import Environment, ensure_group, join
from strategies.distributed.excepthook import install_excepthook
from strategies.distributed.rank_check import require_same_model
from strategies.engine.base import Engine
from strategies.engine.observers import watch
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from strategies.modules.adapters import apply_method, asked_method, require_trainable, still_trained
from strategies.modules.kernels import asked_kernels, install_kernels
from strategies.optim.optimizers import fitting
from strategies.optim.registry import with_named
from strategies.parallel.model import SplitOptions, split_model
from strategies.parallel.stages import stages_of, without_elsewhere
from strategies.protocols import OptimizerFactory, Scheduler, SchedulerFactory, TrainingParts
from strategies.run_directory import claim
from strategies.run_directory.state_consensus import current
from strategies.supervision.supervision import supervise
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import example_batch, examples_for
from strategies.variables import QUIET, RUN_DIRECTORY

if TYPE_CHECKING:
    from strategies.autoplan.tuning import Prospect


@claim.use("dsplan")
def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | OptimizerFactory | Mapping[str, Any] | str | Path | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Scheduler | SchedulerFactory | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    args: object = None,
    collate_fn: Collate | None = None,
    plan: Plan | str | Path | None = None,
    strategy: words.Strategy | None = None,
    backend: words.Backend | None = None,
    sample_data: Dataset[Any] | None = None,
    pipeline: bool = False,
    parallel: Mapping[str, Any] | None = None,
    tp_plan: Mapping[str, str] | None = None,
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
            docs/reference/config.md lists them. What it names, `optimizer=` and `lr_scheduler=` come before. As the
            second argument by position it is understood too.
        args: the command line's values, as argparse has them; its `deepspeed_config` or `dsplan_config` is the config.
        pipeline: whether the model has to be cut into pipeline stages: a plan that does not is refused.
        parallel: degrees of a plan that is made now, by name: `{"tp": 2, "pp": 2, "cp": 1, "ep": 1}`, with
            `pp_schedule`, `virtual_stages` and `sequence_parallel` where the plan is not to choose them; data
            parallelism takes the ranks that they leave. Those of `dsplan run --tp ...` come before.
        tp_plan: how tensor parallelism splits the model's layers: styles by pattern of module names, for example
            `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`; None: the model's own plan, or a rule's.
        sample_data: what the script reads by itself; a plan that is made now looks at its first sample, as it does at
            that of `training_data`.

    Raises:
        DsplanError: what was asked for cannot be planned or run here; one line with the remedy.
    """
    install_excepthook()
    if isinstance(optimizer, (Mapping, str, Path)):
        if config is not None:
            raise CannotRun("initialize: the second argument is a config and config= is given too; leave one out")
        optimizer, config = None, optimizer
    if not isinstance(model, nn.Module):
        raise CannotRun(
            f"initialize: model is a {type(model).__name__}; give a torch.nn.Module (args= takes a command line)"
        )
    script = read_config(_config_of(args, config))
    environment = join()
    options = PlanningOptions(
        plan=plan,
        strategy=strategy,
        backend=backend,
        parallel=degrees_of(_with_stages(parallel, script.pipeline.stages)),
        config=script,
        optimizer=optimizer,
        training_data=sample_data if training_data is None else training_data,
        collate=collate_fn,
    )
    method = asked_method(script, *planned_work(options))
    if done := apply_method(model, method):
        if isinstance(optimizer, torch.optim.Optimizer):
            raise CannotRun(
                "initialize: the optimizer was made before weights were frozen for it; give a function"
                " (optimizer=lambda parameters: ...), or leave it to the config"
            )
        model_parameters = None if model_parameters is None else still_trained(model_parameters, model)
        if environment.is_main:
            notice(done, stream="stdout")
    work = planned_work(options)[0]
    installed = install_kernels(model, asked_kernels(script.kernels, work.get("loss")), environment.device)
    for said in filter(None, (installed.sentence, *installed.notes)):
        if environment.is_main:
            notice(said, stream="stdout")
    require_same_model(model)
    options = replace(options, loss=installed.loss)
    settled, is_new = _settle(model, options, environment)
    if not method.is_full:
        settled = replace(settled, workload={**settled.workload, **method.in_a_plan})
    require_trainable(model, settled.configuration)
    if pipeline and settled.configuration.pp == 1:
        raise CannotRun(
            'initialize: pipeline=True, and the plan has no pipeline; give parallel={"pp": 2} or start with `dsplan run'
            " --pp 2`"
        )
    refuse_deepspeed_keys(script, settled.configuration)
    parts = TrainingParts(
        model=model,
        plan=settled,
        optimizer=optimizer,
        # `model.parameters()` can be walked once, and more than one part looks at them.
        model_parameters=None if model_parameters is None else list(model_parameters),
        lr_scheduler=lr_scheduler,
        gradient_clipping=script.gradient_clipping,
        script=script,
    )
    claim.take_over(is_planned=True)
    tuning = _tuning(model, options, environment)
    monitor = _monitor(settled, environment, script.monitor, is_new=is_new)
    way = find_strategy(settled.configuration, environment)
    if not way.mesh.is_data_parallel:
        ensure_group(environment)
    split_model(model, way.mesh, _how_to_split(model, settled.configuration, options, tp_plan))
    engine = way.engine(fitting(with_named(_here(parts))))
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


def _with_stages(parallel: Mapping[str, Any] | None, stages: int | None) -> Mapping[str, Any] | None:
    """The degrees that a script asks for, those of its config too.

    Raises:
        CannotRun: the two differ.
    """
    if stages is None or (stages == 1 and parallel is None):
        return parallel
    if parallel is not None and parallel.get("pp", stages) != stages:
        raise CannotRun(
            f"config: pipeline.stages is {stages} and parallel= has pp {parallel['pp']}; leave one of them out"
        )
    return {**(parallel or {}), "pp": stages}


def _how_to_split(
    model: nn.Module, configuration: Configuration, options: PlanningOptions, tp_plan: Mapping[str, str] | None
) -> SplitOptions:
    """How the model is split, with what a pipeline looks at."""
    batch = example_batch(options.training_data, options.collate) if configuration.pp > 1 else None
    examples = [] if batch is None else list(examples_for(model, batch))
    return SplitOptions(
        configuration=configuration,
        tp_plan=tp_plan or {},
        examples=[(example.positional, example.named) for example in examples],
        partition=options.config.pipeline.partition,
    )


def _here(parts: TrainingParts) -> TrainingParts:
    """Without the parameters of other pipeline stages."""
    if stages_of(parts.model) is None:
        return parts
    optimizer = parts.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = without_elsewhere(parts.model, optimizer)
    return replace(parts, optimizer=optimizer, model_parameters=without_elsewhere(parts.model, parts.model_parameters))


def _config_of(args: object, config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path | None:
    """The config, or the one that a script's command line names.

    Raises:
        CannotRun: both are given.
    """
    for name in ("deepspeed_config", "dsplan_config"):
        named: Any = getattr(args, name, None)
        if named is not None and config is not None:
            raise CannotRun(f"initialize: args.{name} is {str(named)!r} and config= is given too; leave one out")
        if named is not None:
            config = named
    return config


def _settle(model: nn.Module, options: PlanningOptions, environment: Environment) -> tuple[Plan, bool]:
    """The plan to run, and whether it is another one than was given."""
    plan = settled_plan(model, options, environment)
    is_new = plan is None or plan is current().plan
    if plan is None:
        from strategies.autoplan.live import make_plan  # with the planner's search, which a given plan does not need

        plan = make_plan(model, options, environment)
    elif environment.is_main:
        for warning in filter(None, (another_model(plan, model), another_device(plan, environment.device))):
            notice(warning)
    if not current().chooses_anew:
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
            sharing=plan.configuration.sharing,
            settings=settings,
        )
        if is_new and environment.local_rank == 0:  # the supervisor of every node has to know it
            monitor.plan_made(plan_to_dict(plan))
        return monitor
    if is_new and environment.is_main and not os.environ.get(QUIET):
        print(describe(plan), flush=True)
    return None
