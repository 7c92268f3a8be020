"""Phases of one step, each a ledger; the largest is the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.job import Job
from planner.memory.evaluation import evaluation_ledger
from planner.memory.figures import buffer_bytes
from planner.memory.host import host_bytes, host_load_bytes
from planner.memory.ledger import Ledger, States
from planner.memory.load import load_ledger
from planner.memory.moments import largest_moments
from planner.memory.overhead import closed_form_margin, device_use, library_workspace
from planner.memory.recipe import Recipe, recipe_of
from planner.memory.saving import saving_of
from planner.memory.states import nominal_states_of, states_of
from planner.plan import MemoryEstimate

PHASES = ("forward", "loss", "backward", "step")


def memory_estimate(job: Job) -> MemoryEstimate:
    """Bytes on the busiest rank in the steady state, by category and phase, and what the process uses beyond them."""
    recipe = recipe_of(job.configuration)
    states = states_of(job, recipe)
    phases = _phases_of(job, recipe, states)
    margin = closed_form_margin(job, max(phases.values(), key=lambda ledger: ledger.total))
    return _composed(job, states, phases, margin)


def phases_of(job: Job) -> dict[str, Ledger]:
    """What is alive on the busiest rank at the peak of each phase; `eval` and `save` only where they were asked for."""
    recipe = recipe_of(job.configuration)
    return _phases_of(job, recipe, states_of(job, recipe))


def _phases_of(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    phases = {"load": load_ledger(job, recipe, states), **_phases_of_step(job, recipe, states)}
    if job.workload.evaluation_batch_size:
        phases["eval"] = evaluation_ledger(job, recipe, phases["forward"])
    if job.workload.save != "none":
        resting = replace(phases["step"], gradients=0, temporaries=library_workspace(job))
        phases["save"] = resting + saving_of(job, recipe, states).device
    return phases


def composed(job: Job, phases: Mapping[str, Ledger], margin: float) -> MemoryEstimate:
    """The estimate that follows from the phases; `margin` is the share of the peak that its upper bound adds."""
    return _composed(job, states_of(job, recipe_of(job.configuration)), phases, margin)


def _composed(job: Job, states: States, phases: Mapping[str, Ledger], margin: float) -> MemoryEstimate:
    nominal = nominal_states_of(job, recipe_of(job.configuration))
    peak_phase = max(phases, key=lambda name: phases[name].total)
    categories = phases[peak_phase].rounded()
    allocated = sum(categories.values())
    use = device_use(job, allocated, margin)
    return MemoryEstimate(
        **{f"{name}_bytes": value for name, value in categories.items()},
        peak_allocated_bytes=allocated,
        peak_phase=peak_phase,
        peak_reserved_bytes=use.reserved,
        device_overhead_bytes=use.beside,
        device_used_bytes=use.used,
        device_used_upper_bytes=use.upper,
        host_bytes_per_node=round(host_bytes(job, states, use.used)),
        host_load_bytes_per_node=round(host_load_bytes(job)),
        phases={name: round(ledger.total) for name, ledger in phases.items()},
        states={
            "parameters_bytes": round(nominal.parameters),
            "gradients_bytes": round(nominal.gradients),
            "optimizer_bytes": round(nominal.optimizer),
        },
    )


def _phases_of_step(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    """The largest moment of each phase of the step."""
    weights = states.parameters + buffer_bytes(job, recipe)
    always = Ledger(parameters=weights, optimizer=states.optimizer, temporaries=library_workspace(job))
    largest = largest_moments(job, recipe, states)
    return {phase: always + largest[phase] for phase in PHASES}
