"""Select the plan of an engine, from `dsplan run` or the script, and check it against the job that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardware_db.notices import label_lines, notice
from hardware_db.units import format_bytes, format_seconds
from planner import vocabulary as words
from planner.search.request import Degrees
from planner.types.plan import Configuration, Plan, WorkloadSection
from planner.types.plan_io import load_plan
from strategies.config import ScriptConfig
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


def read_degrees(requested: Mapping[str, Any] | None) -> Degrees | None:
    """The degrees that `dsplan run --tp ...` or a script asks for, those that are left out being 1; None where none are
    asked for.

    Raises:
        UnknownName: a name, or a schedule, is not known.
        CannotRun: a degree is not a whole number of at least 1.
    """
    degrees = named(plan_request().degrees) or requested
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
    """The workload and the precision of the plan that is there before the model is looked at; nothing without one."""
    state = current()
    found = state.plan
    if found is None and (given := _given(options)) is not None:
        found = given[1]
    return ({}, None) if found is None else (found.workload, found.configuration.precision)


def load_given_plan(model: nn.Module, options: PlanningOptions, environment: Environment) -> Plan | None:
    """Return the plan that a run resumes with, else that of `dsplan run` or of the script (`plan=`), or
    None if one has to be made.

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
    found = _given(options)
    if found is None:
        return None
    where, plan = found
    if state.chooses_anew and (why := unfit(plan, state)):
        if environment.is_main:
            notice(f"{where} {why}: another plan is made", stream="stdout")
        return None
    _check(where, plan, options, environment)
    return plan


def unfit(plan: Plan, state: ResumeState) -> str:
    """Why a run cannot train with a plan now; empty where it can."""
    ranks = plan.configuration.world_size
    if state.has_failed(plan):
        return "ran out of memory, or would take as much as one that did"
    return "" if ranks == state.ranks else f"is for {ranks} ranks and {state.ranks} train now"


def to_be_like(options: PlanningOptions) -> Configuration | None:
    """The configuration whose work a new plan takes over: that of the given plan in whose place it comes."""
    found = _given(options)
    return None if found is None else found[1].configuration


def _given(options: PlanningOptions) -> tuple[str, Plan] | None:
    """The plan of the command line or of the script, and what to call it."""
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
    if options.parallel is not None and (other := _other_degree(options.parallel, configuration)):
        raise CannotRun(f"{where} has {other} was asked for; leave parallel= out or plan again")
    asked = options.config.global_batch_size(configuration.dims.data_parallel)
    if asked is not None and asked != configuration.global_batch_size:
        raise CannotRun(
            f"{where} has global batch {configuration.global_batch_size} and the script's config asks for {asked};"
            f" plan again with --global-batch {asked} or change train_batch_size"
        )
    policy = options.config.activations.effective_policy
    if policy not in (None, configuration.activation_checkpointing):
        raise CannotRun(
            f"{where} has activation checkpointing {configuration.activation_checkpointing!r} and the script's config"
            f" asks for {policy!r}; leave activation_checkpointing out of the config or plan again"
        )


def _other_degree(asked: Degrees, plan: Configuration) -> str:
    """In what a plan is another than was asked for: `tp 1 and tp 2`; empty where it is the same."""
    values = ((item.name, getattr(plan, item.name), getattr(asked, item.name)) for item in fields(Degrees))
    other = ((name, has, wanted) for name, has, wanted in values if wanted not in (None, has))
    return next((f"{name} {has} and {name} {wanted}" for name, has, wanted in other), "")


def why_another_model(plan: Plan, model: nn.Module) -> str:
    """What to say where a given plan was made for a model of another size; empty where it was not."""
    planned, here = plan.model.get("parameters"), sum(parameter.numel() for parameter in model.parameters())
    if not isinstance(planned, int) or abs(here - planned) <= _SAME_MODEL * planned:
        return ""
    return (
        f"the plan is for {plan.model.get('name')} with {planned:,} parameters and this model has {here:,}: its"
        " memory and time do not hold here; plan again for this model"
    )


def why_another_device(plan: Plan, device: torch.device) -> str:
    """What to say where a given plan for GPUs runs on a CPU, or one for CPUs on GPUs; empty where it does not."""
    vendor = plan.cluster.get("vendor")
    if vendor is None or (vendor == "cpu") == (device.type == "cpu"):
        return ""
    here = "a CPU" if device.type == "cpu" else "GPUs"
    return (
        f"the plan is for {'a CPU' if vendor == 'cpu' else plan.cluster.get('device')} and its ranks are on {here}: its"
        " memory and time do not hold here; plan again on this machine"
    )


def describe(plan: Plan) -> str:
    """The plan in a few plain lines."""
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
        f"micro-batch {chosen.micro_batch_size} x accumulation {chosen.gradient_accumulation_steps} x"
        f" {ranks} ranks = global batch {chosen.global_batch_size}\n"
        f"predicted {format_bytes(memory.peak_allocated_bytes)} at the peak ({memory.peak_phase}),"
        f" {format_seconds(plan.time.step_seconds)} per step"
    )
