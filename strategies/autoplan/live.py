"""A plan made on the spot: from the live module, the probed machine, and what the script asks for."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from hardware_db.fingerprint import Fingerprint, fingerprint
from hardware_db.measurement import RateMeasurement
from hardware_db.microbench.grid import Point, as_measurement, point_of
from hardware_db.microbench.runner import quick_rates, wanted_points
from hardware_db.microbench.timer import ranks_at_work
from hardware_db.notices import notice
from hardware_db.store import ask_store
from planner import vocabulary as words
from planner.cluster.groups import at_rates
from planner.cluster.rates import rates_from_measurements
from planner.cluster.resolve import probed_cluster
from planner.cost.combinations import compresses, why_refused
from planner.search.recall import recall
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.space import (
    CandidateLayout,
    configuration_of,
    enumerate_candidates,
    micro_batches,
    why_inapplicable,
    why_unfit_degrees,
)
from planner.types.plan import Configuration, Plan
from planner.types.shares import read_rates
from strategies.autoplan.fallback import best_plan
from strategies.autoplan.select import PlanningOptions, find_predecessor
from strategies.config import limits
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun, UnknownName
from strategies.run_directory import claim
from strategies.run_directory.machine import own_machine
from strategies.run_directory.request import plan_request
from strategies.run_directory.state_consensus import current
from strategies.tracing.example import example_batch
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import traced_request, work_of

_LOG = logging.getLogger(__name__)
_ATTENTION_NAMES: dict[str, words.Attention] = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}


@claim.own_work()
def make_plan(model: nn.Module, options: PlanningOptions, environment: Environment) -> Plan:
    """Make a plan for the live module on this machine, on rank 0 for all; every rank must call it.

    Raises:
        NothingFits: no strategy (of those asked for) trains the model in the memory there is.
        UnknownName, CannotRun, ContradictoryRequest: what was asked for cannot be planned.
    """
    measured = machine_rates(environment.device)
    return on_rank_zero(lambda: best_plan(live_request(model, options, environment, measured)))


def live_request(
    model: nn.Module, options: PlanningOptions, environment: Environment, measured: Sequence[RateMeasurement]
) -> Request:
    """Return the request of the live module's training on this machine, with what was measured there.

    A run that continues keeps its global batch, and what a given plan said of the work; as one whose nodes have not all
    come, it leaves a strategy that needs more ranks than there are now, and degrees that do not divide these, with a
    notice (`_splits`).

    Raises:
        UnknownName, CannotRun, ContradictoryRequest: what was asked for cannot be planned.
    """
    strategy, chooses_anew = _requested_strategy(options, environment), current().chooses_anew
    options = replace(options, backend=_requested_backend(options))
    request = _request(model, options, environment, strategy)
    if options.parallel is not None and request.degrees is None:
        notice(f"{_misfit(options.parallel, environment)}: others are chosen", stream="stdout")
    request = replace(request, micro_batch=_micro_batch(options, environment, request.workload.global_batch_size))
    request = _at_rates(request, options, environment)
    if (strategy or options.backend or request.degrees) and not any(True for _ in enumerate_candidates(request)):
        if chooses_anew:
            return with_measured_rates(replace(request, strategies=None, degrees=None), measured)
        if request.degrees and (why := why_unfit_degrees(request)):
            raise CannotRun(f"parallel ({request.degrees}): {why}")
        word, value = ("strategy", strategy) if strategy else ("backend", options.backend)
        if strategy and _refuses_compression(request, strategy):
            raise CannotRun(
                f"config: strategy {strategy!r} cannot compress gradients to {request.gradient_compression} as it runs"
                " here; drop communication.compression, or choose ddp, or ZeRO with backend 'native'"
            )
        reason = (strategy and why_inapplicable(request, strategy)) or "needs several ranks, or a GPU to offload from"
        remedy = (
            "give shard, or choose fsdp"
            if strategy == "hsdp" and request.cluster.gpus > 1
            else "start more ranks with `dsplan run`"
        )
        raise CannotRun(f"{word} {value!r} {reason}; {remedy}, or leave the {word} out")
    if options.backend == "deepspeed":
        _require_whole(request)
    return with_measured_rates(request, measured)


def _at_rates(request: Request, options: PlanningOptions, environment: Environment) -> Request:
    """Return the request on ranks that are as fast as `dsplan run --rates` says.

    Raises:
        CannotRun: they are of other ranks, or ranks cannot have unlike shares as they are asked for.
    """
    text = plan_request().rates
    if text is None:
        return request
    rates = read_rates(text)
    named, ranks = sum(count for count, _ in rates), environment.world_size
    if named != ranks:
        if current().is_resumed:
            notice(f"--rates {text} are of {named} ranks, and {ranks} train now: all count as fast", stream="stdout")
            return request
        raise CannotRun(f"--rates {text} are of {named} ranks, and this job has {ranks}; name one for each")
    if request.micro_batch is not None:
        raise CannotRun(
            f"the config's micro-batch of {request.micro_batch} samples is every rank's, and --rates {text} gives the"
            " slower ones less; give train_batch_size alone"
        )
    if options.backend == "deepspeed":
        raise CannotRun(f"DeepSpeed gives every rank as many samples, and --rates {text} does not; use backend native")
    return replace(request, cluster=at_rates(request.cluster, rates))


def _require_whole(request: Request) -> None:
    """Refuse DeepSpeed, which is handed whole models and shards over all ranks, where every plan does otherwise.

    Raises:
        CannotRun: it is so.
    """
    layouts = enumerate_candidates(request)
    first = next(layouts)
    if _needs_native(first) and all(map(_needs_native, layouts)):
        micro_batch = micro_batches(request, first)[0]
        raise CannotRun(why_refused(replace(configuration_of(request, first, micro_batch), backend="deepspeed")))


def _needs_native(layout: CandidateLayout) -> bool:
    return layout.splits_model or (layout.strategy in words.ZERO_STAGES and layout.dp_replicate > 1)


def _micro_batch(options: PlanningOptions, environment: Environment, global_batch: int) -> int | None:
    """Return the micro-batch that the config decides, unless the number of ranks changed and it divides no more."""
    readers = _count_readers(options, environment)
    if not current().is_resumed:
        return limits.micro_batch(options.config, readers)
    micro = options.config.micro_batch_size
    return micro if micro is not None and global_batch % (micro * readers) == 0 else None


def _count_readers(options: PlanningOptions, environment: Environment) -> int:
    """Count the ranks that read different samples: all, or those that the degrees asked for leave."""
    degrees = _degrees(options, environment)
    return environment.world_size if degrees is None else environment.world_size // degrees.sharing


def _degrees(options: PlanningOptions, environment: Environment) -> Degrees | None:
    """Return the degrees that were asked for, or None if the search has to choose them.

    It has where they do not divide the ranks of a run that continues, or whose nodes have not all come.

    Raises:
        CannotRun: they do not divide the ranks.
    """
    degrees = options.parallel
    if degrees is None or degrees.divide(environment.world_size):
        return degrees
    if current().chooses_anew:
        return None
    raise CannotRun(f"{_misfit(degrees, environment)}; change a degree, or start another number of ranks")


def _misfit(degrees: Degrees, environment: Environment) -> str:
    product = f"tp {degrees.tp} x pp {degrees.pp} x cp {degrees.cp} = {degrees.sharing}"
    if environment.world_size % degrees.sharing == 0:
        product = f"shard {degrees.shard} with {product}"
    return f"parallel: {product} does not divide the {environment.world_size} ranks of this job"


def _splits(
    request: Request, options: PlanningOptions, like: Configuration | None, environment: Environment
) -> tuple[words.Degree, ...]:
    """Return the degrees that the search may choose where none are decided.

    In a run that continues, or whose nodes have not all come, those that it was asked to have or that its plan had. Of
    models whose layers are known: all, a pipeline where the script steps by `train_batch`. Ranks on CPUs, which share
    one memory, split such a model only after a plan of the run has run out of it, and the search does not see which of
    them are on one node.
    """
    before, facts, state = options.parallel or like, request.facts, current()
    had = {name for name in words.DEGREES if state.chooses_anew and before and getattr(before, name) > 1}
    on_cpu = request.cluster.device.is_cpu
    is_known = facts.kind in ("decoder", "encoder") and not facts.recorded_as
    if is_known and (state.failed_plans or not on_cpu):
        had |= {name for name in words.DEGREES if name != "pp" or steps_by_train_batch(Path(sys.argv[0]))}
    if on_cpu and environment.spans_nodes:
        had.discard("tp")
    return tuple(name for name in words.DEGREES if name in had)


def steps_by_train_batch(script: Path) -> bool:
    """Return whether a script hands whole steps, which a pipeline needs, to the engine or to a DistributedTrainer."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError) as problem:
        _LOG.info("no pipeline is considered: %s cannot be read (%s)", script, problem)
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {getattr(call.func, "attr", getattr(call.func, "id", "")): call for call in calls}
    trainer = names.get("DistributedTrainer")
    return "train_batch" in names or (trainer is not None and not any(word.arg == "loss" for word in trainer.keywords))


def _refuses_compression(request: Request, strategy: words.Strategy) -> bool:
    backend = words.default_backend(strategy, zero=request.zero_backend)
    return not why_inapplicable(request, strategy) and not compresses(strategy, backend, request.gradient_compression)


def with_measured_rates(request: Request, measured: Sequence[RateMeasurement]) -> Request:
    """Return the request with rates measured here, for its precision, and with what earlier runs taught."""
    rates = rates_from_measurements(measured, ranks=request.cluster.gpus, precision=request.workload.precision)
    return recall(replace(request, cluster=replace(request.cluster, rates=rates)))


def _request(
    model: nn.Module, options: PlanningOptions, environment: Environment, strategy: words.Strategy | None
) -> Request:
    facts, config = facts_from_module(model), options.config
    like, batch = find_predecessor(options), current().global_batch_size
    optimizer = limits.name_optimizer(options.optimizer, config.optimizer)
    if like and options.optimizer is None and config.optimizer is None:
        optimizer = like.optimizer
    example = example_batch(options.training_data, options.collate)
    task, length = work_of(facts, model, example, like.sequence_length if like else None)
    work = WorkOptions(
        task=task,
        seq_len=length,
        global_batch=config.global_batch_size(_count_readers(options, environment)) if batch is None else batch,
        precision=config.precision or (like.precision if like else None),
        optimizer=optimizer,
        loss=options.loss,
        attention=_ATTENTION_NAMES.get(getattr(getattr(model, "config", None), "_attn_implementation", ""), "sdpa"),
    )
    cluster = limits.add_disk(probed_cluster(own_machine(), ranks=environment.world_size), options.config.zero)
    candidates = _candidates(strategy, options.backend)
    zero = _zero_backend(options.backend)
    request = make_request(facts, cluster, work, strategies=candidates, zero_backend=zero)
    request = replace(request, degrees=_degrees(options, environment))
    request = replace(request, splits=_splits(request, options, like, environment))
    request = replace(request, **limits.limit_offload(options.config.zero, strategy, request.zero_backend))
    request = replace(request, gradient_compression=options.config.communication.compression)
    request = replace(request, zero_plus=limits.read_zero_plus(options.config.zero))
    request = replace(request, **limits.limit_activations(options.config.activations, model))
    return traced_request(request, model, example)


def _candidates(strategy: words.Strategy | None, backend: words.Backend | None) -> tuple[words.Strategy, ...]:
    """Return the strategies to choose from: what was asked for, or all that a backend runs."""
    zero = _zero_backend(backend) or "deepspeed"
    if strategy is not None:
        if backend not in (None, words.default_backend(strategy, zero=zero)):
            raise CannotRun(f"backend {backend!r} does not run strategy {strategy!r}; leave backend= out")
        return (strategy,)
    return tuple(name for name in words.STRATEGIES if backend in (None, words.default_backend(name, zero=zero)))


def _zero_backend(backend: words.Backend | None) -> words.Backend | None:
    """Return the ZeRO that runs: the requested one, `native` without DeepSpeed, or None if the device decides."""
    if backend in ("deepspeed", "native"):
        return backend
    return None if find_spec("deepspeed") is not None else "native"


def _requested_strategy(options: PlanningOptions, environment: Environment) -> words.Strategy | None:
    """Return that of `dsplan run --strategy`, `strategy=`, or the ZeRO stage of the config, in this order."""
    _require_one_stage(options)
    name = plan_request().strategy or options.strategy
    if name is None and options.config.zero_stage is not None:
        unsharded = "ddp" if environment.world_size > 1 else "single"
        name = {0: unsharded, 1: "zero1", 2: "zero2", 3: "zero3"}[options.config.zero_stage]
    if name is not None and name not in words.STRATEGIES:
        raise UnknownName("strategy", name, words.STRATEGIES, hint=f"choose one of {', '.join(words.STRATEGIES)}")
    return name


def _requested_backend(options: PlanningOptions) -> words.Backend | None:
    """Return that of `dsplan run --backend`, or of `backend=`."""
    name = plan_request().backend
    if name is None:
        return options.backend
    if name not in words.BACKENDS:
        raise UnknownName("backend", name, words.BACKENDS, hint=f"choose one of {', '.join(words.BACKENDS)}")
    return name


def _require_one_stage(options: PlanningOptions) -> None:
    """Check the script's `strategy=` against the ZeRO stage of its config.

    Raises:
        CannotRun: they differ.
    """
    stage, strategy = options.config.zero_stage, options.strategy
    if stage is None or strategy is None or strategy not in words.STRATEGIES:
        return
    zeros = ("zero1", "zero2", "zero3")
    if strategy != zeros[stage - 1] if stage else strategy in zeros:
        raise CannotRun(
            f"strategy={strategy!r} was asked for and the config's zero_optimization.stage is {stage}; leave out one of"
            " them"
        )


# Rates of the machine that the ranks run on: out of the database, or measured now and stored.
_Rates = tuple[RateMeasurement, ...]


def machine_rates(device: torch.device, machine: Fingerprint | None = None) -> _Rates:
    """Return what was measured of this machine with as many ranks as run now, newest first, the same on every rank.

    Every rank must call this together. What rank 0 does not find stored for this machine, these versions and this
    number of ranks, all measure in two to three seconds, and rank 0 stores it. `dsplan bench` stores the same and more.
    A database that cannot be read or written stops no training: one line says so.
    """
    wanted, here = wanted_points(device), machine or fingerprint(own_machine())
    stored, missing = on_rank_zero(lambda: _read(here, wanted))
    if not missing:
        return stored
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the script's numbers stay as they were
        measured = tuple(as_measurement(rate, here, "run") for rate in quick_rates(missing, device))
    return on_rank_zero(lambda: _store(measured, stored))


def _read(machine: Fingerprint, wanted: tuple[Point, ...]) -> tuple[_Rates, tuple[Point, ...]]:
    """Return the stored rates, and the points among those wanted that none of them measured."""
    rates: _Rates = ask_store(lambda store: store.rates(machine.key), ())
    stored = tuple(rate for rate in rates if rate.ranks == ranks_at_work())
    measured = {point_of(rate) for rate in stored}
    return stored, tuple(point for point in wanted if point not in measured)


def _store(measured: _Rates, stored: _Rates) -> _Rates:
    ask_store(lambda store: store.add(*measured), 0)
    return (*reversed(measured), *stored)
