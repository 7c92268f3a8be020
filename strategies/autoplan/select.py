"""Select the plan of an engine, from `dsplan run` or the script, and check it against the job that runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardware_db.datasheets import find_device
from hardware_db.notices import label_lines, notice
from hardware_db.units import format_bytes, format_seconds
from planner import vocabulary as words
from planner.search.request import Degrees
from planner.types.plan import Configuration, Plan, WorkloadSection
from planner.types.plan_io import load_plan
from strategies.config.values import ScriptConfig
from strategies.distributed.environment import Environment
from strategies.errors import CannotRun, UnknownName
from strategies.run_directory.request import named, plan_request
from strategies.run_directory.resume_state import ResumeState
from strategies.run_directory.state_consensus import current

_SAME_MODEL = 0.05
"""A new head or a longer position table changes a model's size by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningOptions:
    """The script's requests; a field is None if it left the choice to the plan."""

    plan: Plan | str | Path | None = None
    strategy: words.Strategy | None = None
    backend: words.Backend | None = None
    parallel: Degrees | None = None
    config: ScriptConfig
    optimizer: object = None
    training_data: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    loss: words.Loss = "plain"


def read_degrees(parallel: Mapping[str, Any] | None) -> Degrees | None:
    """Return the degrees that `dsplan run --tp ...` or a script asks for, with 1 for others, or None without any.

    Raises:
        UnknownName: a name, or a schedule, is not known.
        CannotRun: a degree is not a whole number of at least 1.
    """
    degrees = named(plan_request().degrees) or parallel
    if degrees is None:
        return None
    names = tuple(item.name for item in fields(Degrees))
    for name, value in degrees.items():
        if name not in names:
            raise UnknownName("degree", name, names, hint=f"choose from {', '.join(names)}")
        if name == "pp_schedule":
            if value not in words.SCHEDULES:
                raise UnknownName("schedule", str(value), words.SCHEDULES, hint=f"one of {', '.join(words.SCHEDULES)}")
        elif name == "sequence_parallel":
            if not isinstance(value, bool):
                raise CannotRun(f"parallel: sequence_parallel is {value!r}; it must be True or False")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CannotRun(f"parallel: {name} is {value!r}; it must be a whole number of at least 1")
    return Degrees(**degrees)


def read_planned_work(options: PlanningOptions) -> tuple[WorkloadSection, words.Precision | None]:
    """Return workload and precision of the plan that is there before the model is looked at; nothing without one."""
    plan = current().plan
    if plan is None and (given := _load_given(options)) is not None:
        plan = given[1]
    return ({}, None) if plan is None else (plan.workload, plan.configuration.precision)


def load_given_plan(model: nn.Module, options: PlanningOptions, environment: Environment) -> Plan | None:
    """Return the plan of a resumed run, else of `dsplan run` or the script, or None if none is there.

    A run that continues, or waits for nodes, leaves a given plan that failed or is for another number of ranks; rank 0
    says so.

    Raises:
        BrokenFile: the file is not a plan.
        CannotRun: the plan is for another number of ranks, another global batch or another policy of checkpointing
            than the script's.
    """
    state = current()
    # A script may train a second model, which the plan of the first says nothing of.
    if state.plan is not None and not state.is_given and not why_another_model(state.plan, model):
        return state.plan
    given = _load_given(options)
    if given is None:
        return None
    where, plan = given
    if state.chooses_anew and (why := why_unfit(plan, state)):
        if environment.is_main:
            notice(f"{where} {why}: another plan is made", stream="stdout")
        return None
    _check(where, plan, options, environment)
    return plan


def why_unfit(plan: Plan, state: ResumeState) -> str | None:
    """Return why a run cannot train with a plan now, or None if it can."""
    ranks = plan.configuration.world_size
    if state.has_failed(plan):
        return "ran out of memory, or would take as much as one that did"
    return None if ranks == state.ranks else f"is for {ranks} ranks and {state.ranks} train now"


def find_predecessor(options: PlanningOptions) -> Configuration | None:
    """Return the configuration of the given plan in whose place a new one comes, which takes over its work."""
    given = _load_given(options)
    return None if given is None else given[1].configuration


def _load_given(options: PlanningOptions) -> tuple[str, Plan] | None:
    """Return the plan of the command line or of the script, after what to call it."""
    source = plan_request().plan_file or options.plan
    if source is None:
        return None
    return ("the plan", source) if isinstance(source, Plan) else (str(source), load_plan(source))


def _check(where: str, plan: Plan, options: PlanningOptions, environment: Environment) -> None:
    configuration = plan.configuration
    if configuration.world_size != environment.world_size:
        raise CannotRun(
            f"{where} is for {configuration.world_size} ranks and this job has {environment.world_size}; start"
            f" {configuration.world_size} ranks or plan again for {environment.world_size}"
        )
    if options.parallel is not None and (other := _differing_degree(options.parallel, configuration)):
        raise CannotRun(f"{where} has {other} was asked for; leave parallel= out or plan again")
    batch = options.config.global_batch_size(configuration.dims.data_parallel)
    if batch not in (None, configuration.global_batch_size):
        raise CannotRun(
            f"{where} has global batch {configuration.global_batch_size} and the script's config asks for {batch};"
            f" plan again with --global-batch {batch} or change train_batch_size"
        )
    policy = options.config.activations.effective_policy
    if policy not in (None, configuration.activation_checkpointing):
        raise CannotRun(
            f"{where} has activation checkpointing {configuration.activation_checkpointing!r} and the script's config"
            f" asks for {policy!r}; leave activation_checkpointing out of the config or plan again"
        )


def _differing_degree(wanted: Degrees, plan: Configuration) -> str | None:
    """Return in what a plan is another than was asked for, `tp 1 and tp 2`, or None."""
    for item in fields(Degrees):
        has, value = getattr(plan, _FIELDS.get(item.name, item.name)), getattr(wanted, item.name)
        if value not in (None, has):
            return f"{item.name} {has} and {item.name} {value}"
    return None


_FIELDS = {"shard": "state_shards"}
"""Fields of a configuration that have another name than the degree."""


def why_another_model(plan: Plan, model: nn.Module) -> str | None:
    """Return that a given plan was made for a model of another size, or None."""
    planned, here = plan.model.get("parameters"), sum(parameter.numel() for parameter in model.parameters())
    if not isinstance(planned, int) or abs(here - planned) <= _SAME_MODEL * planned:
        return None
    return (
        f"the plan is for {plan.model.get('name')} with {planned:,} parameters and this model has {here:,}: its"
        " memory and time do not hold here; plan again for this model"
    )


def why_another_device(plan: Plan, device: torch.device) -> str | None:
    """Return that a given plan for GPUs runs on a CPU, or one for CPUs on GPUs, or None."""
    vendor = plan.cluster.get("vendor")
    if vendor is None or (vendor == "cpu") == (device.type == "cpu"):
        return None
    here = "a CPU" if device.type == "cpu" else "GPUs"
    return (
        f"the plan is for {'a CPU' if vendor == 'cpu' else plan.cluster.get('device')} and its ranks are on {here}: its"
        " memory and time do not hold here; plan again on this machine"
    )


def why_another_group(plan: Plan, rank: int, gpu: str) -> str | None:
    """Return that a rank's GPU is of the kind that the plan counts among other ranks, or None; `gpu` as torch names it.

    Nodes differ in the order of a cluster file, which is that of the ranks' shares.
    """
    groups = plan.cluster.get("groups", [])
    ends = itertools.accumulate(group["nodes"] * group["gpus_per_node"] for group in groups)
    planned = next((group["device"] for group, end in zip(groups, ends, strict=True) if rank < end), None)
    try:
        here = find_device(gpu).name
    except UnknownName:
        return None
    if planned in (None, here) or here not in {group["device"] for group in groups}:
        return None
    return (
        f"rank {rank} is on {here} and the plan's share for it is of {planned}; start the nodes in the order of the"
        f" cluster file ({', '.join(group['device'] for group in groups)})"
    )


def describe(plan: Plan) -> str:
    """Describe a plan in a few plain lines."""
    chosen, memory = plan.configuration, plan.memory
    ranks = chosen.dims.data_parallel
    extras = chosen.degrees_text + "".join(
        f", {label} {value}"
        for label, value in (
            ("checkpointing", chosen.activation_checkpointing),
            ("offload", chosen.offload + ("" if chosen.offload_ratio == 1 else f" {chosen.offload_ratio:.0%}")),
            ("gradients in", chosen.gradient_compression),
            ("activations on", "host" if chosen.activations_on_host else "none"),
        )
        if value != "none"
    )
    return label_lines(
        f"{chosen.strategy} ({chosen.backend}) on {chosen.world_size} x {plan.cluster.get('device')},"
        f" {chosen.precision}, {chosen.optimizer}{extras}\n"
        f"micro-batch {chosen.micro_batch_text} x accumulation {chosen.gradient_accumulation_steps} x"
        f" {ranks} ranks = global batch {chosen.global_batch_size}\n"
        f"predicted {format_bytes(memory.peak_allocated_bytes)} at the peak ({memory.peak_phase}),"
        f" {format_seconds(plan.time.step_seconds)} per step"
    )
