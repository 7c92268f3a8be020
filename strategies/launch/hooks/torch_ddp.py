"""Scripts that spread their model by torch's own classes: DDP, whose place the plan's strategy takes, and FSDP.

What was asked for is applied where the script wraps its model, since sharding needs no batch to be known. The script
keeps its micro-batch, accumulation, precision and optimizer: they are seen in the first step, and what they should
cost is predicted after it. Where nothing was asked for, DDP stays.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardware_db.errors import DsplanError
from hardware_db.units import format_bytes
from planner import vocabulary as words
from planner.cluster.resolve import probed_cluster
from planner.models.facts import ModelFacts
from planner.search.estimate import estimate
from planner.search.request import WorkOptions, make_request
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import plan_to_dict
from strategies.autoplan.live import machine_rates, with_measured_rates
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.environment import Environment, join
from strategies.errors import CannotRun
from strategies.integrations.ddp_script import ScriptParallel, configuration_for, follow_script, observe
from strategies.launch.hooks import capabilities, observer
from strategies.launch.hooks.script_plan import load_given_plan, say
from strategies.protocols import Observer
from strategies.run_directory import claim
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.heartbeat import PULSE, script_line
from strategies.run_directory.machine import own_machine
from strategies.run_directory.request import plan_request
from strategies.supervision.hang_detection import begin_watching
from strategies.supervision.stopping import Stopping, open_board
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.live import facts_from_module
from strategies.tracing.step import checkpointing
from strategies.variables import RUN_DIRECTORY

_REMEDIES: tuple[words.Strategy, ...] = ("zero2", "fsdp", "zero3")


def wrap(original: Callable[..., None], wrapper: Any, module: nn.Module, *positional: Any, **named: Any) -> None:
    """Run `DistributedDataParallel.__init__`, or put the requested strategy in the place of DDP."""
    plan = load_given_plan("torch")
    configuration = plan.configuration if plan is not None else _named_configuration()
    facts = facts_from_module(module)
    if configuration is None or configuration.strategy in ("single", "ddp"):
        original(wrapper, module, *positional, **named)
        configuration = configuration_for("ddp", int(os.environ["WORLD_SIZE"]))
    else:
        line = script_line(sys._getframe())
        kind = type(wrapper)
        if kind is not DistributedDataParallel:
            raise CannotRun(
                f"{line}: {kind.__name__} is a class of its own over DDP, whose place strategy"
                f" {configuration.strategy!r} cannot take; use ddp"
            )
        if configuration.activation_checkpointing != "none":
            checkpointing.checkpoint_activations(
                module, configuration.activation_checkpointing, every=configuration.checkpoint_every
            )
        follow_script()
        wrapper.__class__ = ScriptParallel
        wrapper.__init__(module, *positional, **named, configuration=configuration)
        say(
            f"{configuration.strategy} takes the place of DDP at {line}; micro-batch, accumulation, precision and"
            " optimizer stay the script's own, and so do saving and loading"
        )
    _measure(wrapper, facts, configuration)


def shard(original: Callable[..., Any], module: Any, *positional: Any, **named: Any) -> Any:
    """Run `fully_shard`, measured as fsdp, which is all that such a script can run."""
    _refuse_another("fsdp", "shards its model itself")
    facts = facts_from_module(module) if isinstance(module, nn.Module) else None
    result = original(module, *positional, **named)
    if facts is not None:
        _measure(module, facts, configuration_for("fsdp", int(os.environ["WORLD_SIZE"])))
    return result


def shard_by_fsdp1(original: Callable[..., None], wrapper: Any, module: nn.Module, *rest: Any, **named: Any) -> None:
    """Run `FullyShardedDataParallel.__init__`, likewise; it wraps parts of the model by itself on its way."""
    _refuse_another("fsdp", "shards its model itself")
    facts = facts_from_module(module)
    original(wrapper, module, *rest, **named)
    _measure(wrapper, facts, configuration_for("fsdp", int(os.environ["WORLD_SIZE"])))


def parallelize(original: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    """Run `parallelize_module`: tensor parallelism of the script's own."""
    _refuse_another("", "splits its layers itself by parallelize_module")
    return original(*positional, **named)


def _refuse_another(own: str, what: str) -> None:
    plan = load_given_plan("torch")
    capabilities.require_possible("torch", own or None, gpus=torch.cuda.is_available())
    strategy = plan.configuration.strategy if plan is not None else plan_request().strategy
    if strategy and strategy != own:
        remedy = f"leave --strategy out, or name {own}" if own else "leave --strategy out"
        line = script_line(sys._getframe())
        raise CannotRun(f"{line}: the script {what}, so strategy {strategy!r} cannot be applied; {remedy}")


def _named_configuration() -> Configuration | None:
    """Return the configuration that `--strategy` names; None where there is none."""
    strategy: Any = plan_request().strategy
    capabilities.require_possible("torch", strategy, gpus=torch.cuda.is_available())
    return configuration_for(strategy, int(os.environ["WORLD_SIZE"])) if strategy else None


# The first step shows what the script trains with; then its cost is predicted, beside what is measured.


@dataclass(kw_only=True, slots=True)
class _Seen:
    """The settings that the first step has shown."""

    micro_batch: int = 0
    accumulation: int = 0
    sequence_length: int = 1
    precision: words.Precision = "fp32"


class FirstStep(Observer):
    """Sees the micro-batches of the first step and has the plan made of them; then it does nothing."""

    def __init__(self, module: nn.Module, facts: ModelFacts, configuration: Configuration, monitor: RunMonitor) -> None:
        self._module, self._facts, self._configuration, self._monitor = module, facts, configuration, monitor
        self._seen = _Seen()
        self._is_over = self._has_loss = False

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Note the size, the kind and the precision of a micro-batch of the first step."""
        PULSE.call()
        if self._is_over:
            return
        seen = self._seen
        tensors = [item for item in (*inputs[0], *inputs[1].values()) if isinstance(item, torch.Tensor)]
        if not tensors:
            return
        first = tensors[0]
        seen.micro_batch = max(seen.micro_batch, first.shape[0] if first.dim() else 1)
        seen.accumulation += 1
        if first.dim() == 2 and not first.is_floating_point():
            seen.sequence_length = max(seen.sequence_length, first.shape[1])
        seen.precision = _precision(first.device.type, self._module)

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note that the model itself returns its loss."""
        self._has_loss = True

    def backward_starts(self, root: torch.Tensor) -> None:
        """Take the scalar that a backward pass begins from for the loss, unless the model returns one."""
        if not self._has_loss:
            self._monitor.loss_is(root)

    def step_ended(self) -> None:
        """Have the plan made of what the first step has shown."""
        PULSE.step += 1
        PULSE.call()
        if self._is_over:
            return
        self._is_over = True
        try:
            plan = self._predicted()
        except DsplanError as problem:
            say(f"no prediction for this script: {problem}")
            return
        if os.environ["LOCAL_RANK"] == "0":
            self._monitor.plan_made(plan_to_dict(plan))
        self._monitor.training_starts()

    def _predicted(self) -> Plan:
        """Return the plan of what the script does, the same on every rank; every rank calls this together."""
        if not self._seen.micro_batch:
            raise CannotRun("its model was given no tensors")
        measured = machine_rates(next(self._module.parameters()).device)
        plan, remedy = on_rank_zero(lambda: self._plan(measured))
        if remedy:
            say(remedy)
        return plan

    def _plan(self, measured: Any) -> tuple[Plan, str]:
        ranks, seen = int(os.environ["WORLD_SIZE"]), self._seen
        total = seen.micro_batch * seen.accumulation * ranks
        work = WorkOptions(seq_len=seen.sequence_length, global_batch=total, precision=seen.precision)
        request = with_measured_rates(
            make_request(self._facts, probed_cluster(own_machine(), ranks=ranks), work, zero_backend="native"), measured
        )
        chosen = replace(
            self._configuration,
            micro_batch_size=seen.micro_batch,
            gradient_accumulation_steps=seen.accumulation,
            global_batch_size=total,
            sequence_length=seen.sequence_length,
            precision=seen.precision,
        )
        plan = estimate(request, chosen)
        if plan.verdict != "does_not_fit" or chosen.strategy != "ddp":
            return plan, ""
        for name in _REMEDIES:
            other = configuration_for(name, ranks)
            fields = {key: getattr(other, key) for key in ("strategy", "backend", "dp_replicate", "dp_shard")}
            if estimate(request, replace(chosen, **fields)).verdict != "does_not_fit":
                needs = format_bytes(plan.memory.device_used_bytes)
                return plan, f"ddp is predicted to need {needs}, which does not fit here; --strategy {name} would"
        return plan, "ddp is predicted not to fit here, and no other strategy is"


def _precision(device: str, module: nn.Module) -> words.Precision:
    """Return what a forward pass computes in: autocast's dtype, else the weights'."""
    if torch.is_autocast_enabled(device):
        return "fp16" if torch.get_autocast_dtype(device) == torch.float16 else "bf16"
    return "bf16-pure" if next(module.parameters()).dtype == torch.bfloat16 else "fp32"


class _Measured:
    """The outermost module that the script has wrapped so far, which stands for the model."""

    module: nn.Module | None = None
    monitor: RunMonitor | None = None
    stops: tuple[Callable[[], None], ...] = ()


def _measure(module: nn.Module, facts: ModelFacts, configuration: Configuration) -> None:
    """Write the metrics of a script's loop over a module: one for each run, so a second model is not measured."""
    measured, device = _Measured, next(module.parameters()).device
    if measured.module is not None and measured.module not in set(module.modules()):
        return say("a second model that the script wraps is not measured")
    claim.take_over(is_planned=True)
    if measured.monitor is None:
        rank, directory = int(os.environ["RANK"]), Path(os.environ[RUN_DIRECTORY])
        measured.monitor = RunMonitor(directory, rank=rank, device=device, sequence_length=0)
        _watch_together(directory, replace(join(), device=device))
    for stop in measured.stops:
        stop()
    first = FirstStep(module, facts, configuration, measured.monitor)
    unfollow = observer.when_backward_starts(first.backward_starts)
    measured.module, measured.stops = module, (observe(module, measured.monitor), observe(module, first), unfollow)
    measured.monitor.training_starts()
    return None


def _watch_together(directory: Path, environment: Environment) -> None:
    """Let the ranks' watchdogs know of each other; every rank calls this together."""
    options = AttemptOptions.load(directory)
    if options is None:
        return
    board = open_board(directory, environment)
    watch = begin_watching(directory, environment.rank, options.supervision.hang_seconds)
    watch.attach(board, Stopping(board, environment.rank, environment.world_size), environment.world_size)
    atexit.register(watch.end)
