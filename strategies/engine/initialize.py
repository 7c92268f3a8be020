"""`dsplan.initialize`: from a module to an engine that trains it, under whichever plan.

Configure, find weights in files, adapt, plan, split, build, read weights, supervise: each phase hands the next ones a
frozen value. Their order, and that of what each does, is the same on every rank, since ranks meet in most of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hardware_db.notices import notice
from planner import vocabulary as words
from planner.search.request import Degrees
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.autoplan.select import (
    PlanningOptions,
    describe,
    load_given_plan,
    read_degrees,
    read_planned_work,
    why_another_device,
    why_another_group,
    why_another_model,
)
from strategies.checkpoint.streaming import prepare_weights
from strategies.config.limits import refuse_deepspeed_keys
from strategies.config.read import read_config
from strategies.config.values import MonitorSettings, ScriptConfig
from strategies.data.loader import Collate, LoaderSettings, ShardedLoader
from strategies.distributed.environment import Environment, ensure_group, join
from strategies.distributed.excepthook import install_excepthook
from strategies.distributed.rank_check import require_same_model
from strategies.engine.base import Engine, Strategy
from strategies.engine.observers import watch
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from strategies.modules.adapters import TrainingMethod, apply_method, read_method, require_trainable, select_trained
from strategies.modules.kernels import install_kernels, read_kernels
from strategies.optim.optimizers import guard_optimizer
from strategies.optim.registry import resolve_names
from strategies.parallel.model import SplitOptions, split_model
from strategies.parallel.stages import stages_of, without_elsewhere
from strategies.protocols import OptimizerFactory, Scheduler, SchedulerFactory, TrainingParts
from strategies.run_directory import claim
from strategies.run_directory.state_consensus import current
from strategies.supervision import supervision
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import example_batch, examples_for
from strategies.variables import QUIET, RUN_DIRECTORY

if TYPE_CHECKING:
    from strategies.autoplan.tuning import Prospect

ConfigSource = Mapping[str, Any] | str | Path
"""A config as scripts give it: a dictionary with DeepSpeed's keys, or the path of a JSON file with them."""


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
    weights: str | Path | None = None,
) -> tuple[Engine, torch.optim.Optimizer, ShardedLoader | None, Scheduler | None]:
    """Place a model under a plan and return (engine, optimizer, dataloader, scheduler); called on every rank.

    The plan is, in this order: the file that `dsplan run --plan` hands over, `plan=`, or one made now from the module
    and this machine. Rank 0 prints a plan that was made now, unless DSPLAN_QUIET is set.

    Args:
        model: on any device, whole and with the weights to start from; rank 0's weights count. With `weights=`, built
            without memory (`dsplan.empty_weights`).
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
        plan: a plan, or the file of one that `dsplan recommend --out` wrote.
        strategy: what a plan that is made now must have, and a given one has to agree with; None leaves it open.
        backend: the same.
        pipeline: whether the model has to be cut into pipeline stages: a plan that does not is refused.
        parallel: degrees of a plan that is made now, by name: `{"tp": 2, "pp": 2, "cp": 1, "ep": 1}`, with
            `pp_schedule`, `virtual_stages` and `sequence_parallel` where the plan is not to choose them; data
            parallelism takes the ranks that they leave. Those of `dsplan run --tp ...` come before.
        tp_plan: how tensor parallelism splits the model's layers: styles by pattern of module names, for example
            `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`; None: the model's own plan, or a rule's.
        weights: a directory of safetensors files (the Hub's layout, an export, a checkpoint of dsplan's) or one file,
            from which every rank reads its own parts of the model; as the config's `weights`.
        sample_data: what the script reads by itself; a plan that is made now looks at its first sample, as it does at
            that of `training_data`.

    Raises:
        DsplanError: what was asked for cannot be planned or run here; one line with the remedy.
    """
    install_excepthook()  # first: from here on a rank that fails says so before the others wait for it
    configured = configure(model, optimizer, config, args=args, parallel=parallel)
    files = prepare_weights(model, weights or configured.script.weights, configured.environment)
    options = PlanningOptions(
        plan=plan,
        strategy=strategy,
        backend=backend,
        parallel=configured.degrees,
        config=configured.script,
        optimizer=configured.optimizer,
        training_data=sample_data if training_data is None else training_data,
        collate=collate_fn,
    )
    adapted = adapt(model, options, configured.environment, model_parameters)
    planned = choose_plan(model, adapted, configured.environment, has_to_split=pipeline)
    runner = split(model, planned.plan, adapted.options, configured.environment, tp_plan or {})
    parts = TrainingParts(
        model=model,
        plan=planned.plan,
        optimizer=configured.optimizer,
        model_parameters=adapted.model_parameters,
        lr_scheduler=lr_scheduler,
        gradient_clipping=configured.script.gradient_clipping,
        script=configured.script,
    )
    engine = build(runner, parts, training_data, collate_fn)
    if files is not None:
        engine.read_weights(files)
    supervise(engine, configured.script, planned)
    return engine, engine.optimizer, engine.dataloader, engine.lr_scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Configured:
    """The script's config, read, and the ranks that it runs on."""

    script: ScriptConfig
    environment: Environment
    optimizer: torch.optim.Optimizer | OptimizerFactory | None
    """The script's own."""
    degrees: Degrees | None
    """Those that a plan made now must have; None leaves them to it."""


def configure(
    model: object,
    optimizer: torch.optim.Optimizer | OptimizerFactory | ConfigSource | None,
    config: ConfigSource | None,
    *,
    args: object = None,
    parallel: Mapping[str, Any] | None = None,
) -> Configured:
    """Read the config and join the process group.

    Raises:
        CannotRun: arguments of `initialize` contradict each other, or the ranks do not fit together.
    """
    if isinstance(optimizer, (Mapping, str, Path)):
        if config is not None:
            raise CannotRun("initialize: the second argument is a config and config= is given too; leave one out")
        optimizer, config = None, optimizer
    if not isinstance(model, nn.Module):
        raise CannotRun(
            f"initialize: model is a {type(model).__name__}; give a torch.nn.Module (args= takes a command line)"
        )
    # The config before the ranks meet: a mistake in it is the same on all, and none has to wait for it.
    script = read_config(_choose_config(args, config))
    environment = join()
    of_config = {"pp": script.pipeline.stages, "shard": script.zero.shard}
    degrees = read_degrees(_add_degrees(parallel, of_config))
    return Configured(script=script, environment=environment, optimizer=optimizer, degrees=degrees)


def _choose_config(args: object, config: ConfigSource | None) -> ConfigSource | None:
    """Return the config, or the one that a script's command line names.

    Raises:
        CannotRun: both are given.
    """
    for name in ("deepspeed_config", "dsplan_config"):
        of_args: Any = getattr(args, name, None)
        if of_args is not None and config is not None:
            raise CannotRun(f"initialize: args.{name} is {str(of_args)!r} and config= is given too; leave one out")
        config = config if of_args is None else of_args
    return config


_DEGREE_KEYS = {"pp": "pipeline.stages", "shard": "zero_optimization.mics_shard_size"}
"""Keys of a config that are degrees, by the words of `parallel=`."""


def _add_degrees(parallel: Mapping[str, Any] | None, of_config: Mapping[str, int | None]) -> Mapping[str, Any] | None:
    """Add the degrees that a config asks for to those of `initialize`.

    Raises:
        CannotRun: the two differ.
    """
    for name, degree in of_config.items():
        if degree is None or (name == "pp" and degree == 1 and parallel is None):
            continue
        if parallel is not None and parallel.get(name, degree) != degree:
            raise CannotRun(
                f"config: {_DEGREE_KEYS[name]} is {degree} and parallel= has {name} {parallel[name]}; leave one of them"
                " out"
            )
        parallel = {**(parallel or {}), name: degree}
    return parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """Facts that planning and the optimizer need of a model that was changed in place."""

    method: TrainingMethod
    """Which weights are trained."""
    options: PlanningOptions
    """The script's, with the loss that the kernels compute."""
    model_parameters: list[Any] | None
    """What the optimizer trains of those that the script named; None: all that require gradients."""


def adapt(
    model: nn.Module, options: PlanningOptions, environment: Environment, model_parameters: Iterable[Any] | None = None
) -> Adapted:
    """Put adapters and kernels into the model, in place, and check that all ranks have the same.

    Raises:
        CannotRun: the model has not got what the method or a kernel is for, or ranks differ.
        BackendMissing: a library of the method is not installed.
    """
    workload, precision = read_planned_work(options)
    method = read_method(options.config, workload, precision)
    adapters = apply_method(model, method)
    # More than one part looks at the parameters, and `model.parameters()` can be walked once.
    parameters = None if model_parameters is None else list(model_parameters)
    if adapters:
        if isinstance(options.optimizer, torch.optim.Optimizer):
            raise CannotRun(
                "initialize: the optimizer was made before weights were frozen for it; give a function"
                " (optimizer=lambda parameters: ...), or leave it to the config"
            )
        parameters = None if parameters is None else select_trained(parameters, model)
    _say(adapters, environment)
    # Behind the adapters, which put modules of their own around those that kernels replace.
    kernels = install_kernels(model, read_kernels(options.config.kernels, workload.get("loss")), environment.device)
    _say(kernels.sentence, environment)
    for note in kernels.notes:
        _say(note, environment)
    require_same_model(model)  # as it is trained: ranks may have adapted different models
    return Adapted(method=method, options=replace(options, loss=kernels.loss), model_parameters=parameters)


def _say(sentence: str | None, environment: Environment) -> None:
    if sentence and environment.is_main:
        notice(sentence, stream="stdout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan, and what follows it."""

    plan: Plan
    tuning: Prospect | None
    """What the plan is tuned with; None: it stays."""
    monitor: RunMonitor | None
    """Writes metrics for `dsplan run`; None in a script that was started otherwise."""


def choose_plan(model: nn.Module, adapted: Adapted, environment: Environment, *, has_to_split: bool = False) -> Planned:
    """Load the plan or make one, claim the run for it, and print or hand over one that was made now.

    `has_to_split` refuses a plan without a pipeline.

    Raises:
        DsplanError: there is no plan, or the script, the model or its adapters contradict it.
    """
    plan, is_new = _settle(model, adapted.options, environment)
    if not adapted.method.is_full:
        plan = replace(plan, workload={**plan.workload, **adapted.method.in_a_plan})
    require_trainable(model, plan.configuration)
    if has_to_split and plan.configuration.pp == 1:
        raise CannotRun(
            'initialize: pipeline=True, and the plan has no pipeline; give parallel={"pp": 2} or start with `dsplan run'
            " --pp 2`"
        )
    refuse_deepspeed_keys(adapted.options.config, plan.configuration)
    # Not before all that may refuse the plan: who claims a run measures it from then on.
    claim.take_over(is_planned=True)
    # The model is whole here, as the search has to see it; splitting takes it apart.
    tuning = _prepare_tuning(model, adapted.options, environment)
    # Before anything is built under the plan, which may run out of memory: the supervisor then knows of which.
    monitor = _announce(plan, environment, adapted.options.config.monitor, is_new=is_new)
    return Planned(plan=plan, tuning=tuning, monitor=monitor)


def _settle(model: nn.Module, options: PlanningOptions, environment: Environment) -> tuple[Plan, bool]:
    """Return the plan to run, and whether it is another one than was given."""
    plan = load_given_plan(model, options, environment)
    is_new = plan is None or plan is current().plan
    if plan is None:
        from strategies.autoplan.live import make_plan  # with the planner's search, which a given plan does not need

        plan = make_plan(model, options, environment)
    else:
        _hold_against(plan, model, environment)
    if not current().chooses_anew:
        _require_same_choice(plan, options.strategy, options.backend)
    return plan, is_new


def _hold_against(plan: Plan, model: nn.Module, environment: Environment) -> None:
    """Hold a given plan against the model and the devices here; rank 0 says what is unlike.

    Raises:
        CannotRun: this rank would have the share of another kind of GPU.
    """
    if environment.device.type == "cuda" and plan.configuration.has_shares:
        gpu = torch.cuda.get_device_name(environment.device)
        if why := why_another_group(plan, environment.rank, gpu):
            raise CannotRun(why)
    if environment.is_main:
        for warning in filter(None, (why_another_model(plan, model), why_another_device(plan, environment.device))):
            notice(warning)


def _require_same_choice(plan: Plan, strategy: str | None, backend: str | None) -> None:
    """Check the plan against what the script names beside it.

    Raises:
        CannotRun: they differ.
    """
    chosen = plan.configuration
    for word, named, planned in (("strategy", strategy, chosen.strategy), ("backend", backend, chosen.backend)):
        if named not in (None, planned):
            raise CannotRun(
                f"{word}={named!r} was asked for and the plan has {planned!r}; leave {word}= out or plan again"
            )


def _prepare_tuning(model: nn.Module, options: PlanningOptions, environment: Environment) -> Prospect | None:
    directory = os.environ.get(RUN_DIRECTORY)
    if not current().tunes or directory is None:
        return None
    from strategies.autoplan.tuning import prepare_tuning  # with the planner's search

    return prepare_tuning(model, options, environment, Path(directory))


def _announce(plan: Plan, environment: Environment, settings: MonitorSettings, *, is_new: bool) -> RunMonitor | None:
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


def split(
    model: nn.Module, plan: Plan, options: PlanningOptions, environment: Environment, tp_plan: Mapping[str, str]
) -> Strategy:
    """Return the strategy that runs a plan, and leave in the model what this rank has of it, in place.

    Raises:
        DsplanError: no strategy of this version runs the plan, or the model cannot be split so.
    """
    configuration = plan.configuration
    strategy = find_strategy(configuration, environment)
    if not strategy.mesh.is_data_parallel:
        ensure_group(environment)  # a rank alone has none yet, and meshes are made of it
    batch = example_batch(options.training_data, options.collate) if configuration.pp > 1 else None
    examples = [] if batch is None else list(examples_for(model, batch))
    split_options = SplitOptions(
        configuration=configuration,
        tp_plan=tp_plan,
        examples=[(example.positional, example.named) for example in examples],
        partition=options.config.pipeline.partition,
    )
    split_model(model, strategy.mesh, split_options)
    return strategy


def build(
    strategy: Strategy, parts: TrainingParts, training_data: Dataset[Any] | None = None, collate: Collate | None = None
) -> Engine:
    """Make the engine of a model that was split, and its loader.

    Raises:
        CannotRun: the optimizer, the scheduler or the data cannot be used under the plan.
        BackendMissing: the optimizer's library is not installed.
    """
    # The parameters of this rank's stages first: what the config names is made of these, and then checked.
    engine = strategy.engine(guard_optimizer(resolve_names(_drop_other_stages(parts))))
    engine.checkpointing = parts.script.checkpoint
    if training_data is not None:
        settings = LoaderSettings(section=parts.script.data, collate=collate)
        engine.dataloader = ShardedLoader(training_data, parts.plan.configuration, engine.environment, settings)
    return engine


def _drop_other_stages(parts: TrainingParts) -> TrainingParts:
    """Leave out the parameters of other pipeline stages."""
    if stages_of(parts.model) is None:
        return parts
    optimizer = parts.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = without_elsewhere(parts.model, optimizer)
    return replace(parts, optimizer=optimizer, model_parameters=without_elsewhere(parts.model, parts.model_parameters))


def supervise(engine: Engine, script: ScriptConfig, planned: Planned) -> None:
    """Give an engine the observers of its config and of the run, and resume the run.

    Raises:
        BrokenFile: none of the run's checkpoints can be loaded.
        BackendMissing: TensorBoard is not installed.
    """
    # Observers are called in this order at the end of a step: what counts and writes it down comes before what saves
    # and stops, and the tuner, which may end the process, behind the supervision that saves for it.
    if planned.monitor is not None:
        engine.observers.append(planned.monitor)
        planned.monitor.training_starts(lambda: engine.global_steps)
    watch(engine, script, planned.monitor)
    supervision.supervise(engine)
    if planned.tuning is not None:
        planned.tuning.watch(engine)
