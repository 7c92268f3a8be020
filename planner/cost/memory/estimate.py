"""Phases of one step, each a ledger; the largest is the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.cost.code_bases import code_base
from planner.cost.generation import engine_bytes
from planner.cost.memory.activations.figures import buffer_bytes
from planner.cost.memory.host import host_bytes, host_load_bytes
from planner.cost.memory.ledger import Ledger, States
from planner.cost.memory.load import load_ledger, saving_of
from planner.cost.memory.overhead import closed_form_margin, device_use, library_workspace
from planner.cost.memory.reference import block_token_bytes
from planner.cost.memory.rollout import ROUND, critic_bytes, with_round
from planner.cost.memory.states import is_uneven, nominal_states_of, states_of
from planner.cost.memory.timeline import largest_moments
from planner.cost.memory.units import trained_units_of
from planner.cost.precision import Recipe, recipe_of, stored_precision
from planner.cost.split import stages_looked_at
from planner.types.job import Job
from planner.types.plan import MemoryEstimate
from planner.vocabulary import CLASSIFYING

# Memory of evaluation: a forward pass without gradients, and the logits on the device.


KEPT_BYTES = 4
"""Per logit that is kept: accelerate's `convert_outputs_to_fp32`."""


def evaluation_ledger(job: Job, recipe: Recipe, forward: Ledger) -> Ledger:
    """Return the largest moment of an evaluation.

    It has a training step's weights, optimizer states and unsharded parameters, which `forward` has too.
    """
    working = max(_block(job, recipe), _logits_and_loss(job, recipe))
    step, kept = _step_logits(job), job.workload.evaluation_steps_kept
    if kept:
        everyones = KEPT_BYTES * step * job.configuration.dims.data_parallel
        working = max((kept - 1) * everyones + working, (2 * kept if kept > 1 else 1) * everyones + KEPT_BYTES * step)
    return replace(forward, gradients=0, activations=working)


def _tokens(job: Job) -> int:
    return job.workload.evaluation_batch_size * job.configuration.sequence_length


def _block(job: Job, recipe: Recipe) -> float:
    """Return what one block's forward works with when nothing is saved."""
    facts, tokens = job.facts, _tokens(job)
    if facts.kind == "custom":
        return _unknown_block(job, recipe)
    return tokens * block_token_bytes(job, recipe)


def _unknown_block(job: Job, recipe: Recipe) -> float:
    """Return the working set of a custom module's block: what a trace says, or its matrices' inputs and outputs."""
    if job.facts.traced:
        return job.workload.evaluation_batch_size * max(traced.block for traced in job.facts.traced.values())
    return _tokens(job) * 2 * recipe.compute * job.counts.largest_block / max(job.facts.hidden_size, 1)


def _step_logits(job: Job) -> float:
    """Logits of one step on one device: for each token and word, or for each sample and label."""
    facts, workload = job.facts, job.workload
    if workload.task in CLASSIFYING or not facts.vocab_size:
        return workload.evaluation_batch_size * max(facts.num_labels, 1)
    return _tokens(job) * facts.vocab_size / (job.configuration.tp * job.configuration.cp)


def _logits_and_loss(job: Job, recipe: Recipe) -> float:
    """Logits, their fp32 copy where they are 16-bit, and the log-softmax of the loss."""
    return _step_logits(job) * (recipe.compute + (4 if recipe.compute < 4 else 0) + 4)


PHASES = ("forward", "loss", "backward", "step")


def memory_estimate(job: Job, *, stages: tuple[int, ...] | None = None) -> MemoryEstimate:
    """Bytes on the busiest rank in the steady state, by category and phase, and what the process uses beyond them.

    With `stages` it is the busiest rank of these stages of the pipeline.
    """
    busiest, states, phases = _busiest(job, stages)
    margin = closed_form_margin(job, max(phases.values(), key=_total))
    return _composed(busiest, states, phases, margin)


def phases_of(job: Job, *, stages: tuple[int, ...] | None = None) -> dict[str, Ledger]:
    """Return what is alive on the busiest rank at the peak of each phase.

    `eval` and `save` are there only where they were asked for. Without `stages` it is of those that can be the busiest.
    """
    return _busiest(job, stages)[2]


def _busiest(job: Job, stages: tuple[int, ...] | None = None) -> tuple[Job, States, dict[str, Ledger]]:
    """Return the job as the pipeline stage with the largest peak sees it, with its states.

    The ledgers are, of every phase, the largest moment of any stage.
    """
    recipe, stages_phases = recipe_of(job), []
    for stage in stages or stages_looked_at(job.configuration):
        here = replace(job, stage=stage) if stage != job.stage else job
        states = states_of(here, recipe)
        stages_phases.append((here, states, _phases_of(here, recipe, states)))
    if len(stages_phases) == 1:
        return stages_phases[0]
    busiest, states, _ = max(stages_phases, key=lambda entry: max(map(_total, entry[2].values())))
    every = [phases for _, _, phases in stages_phases]
    names = [name for name in ("load", *PHASES, *ROUND, "eval", "save") if any(name in phases for phases in every)]
    return busiest, states, {name: max((p[name] for p in every if name in p), key=_total) for name in names}


def _total(ledger: Ledger) -> float:
    return ledger.total


def _phases_of(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    phases = {"load": load_ledger(job, recipe, states), **_phases_of_step(job, recipe, states)}
    if job.workload.generates:
        phases = with_round(job, recipe, phases, _resting(job, recipe, states))
    if job.workload.evaluation_batch_size:
        phases["eval"] = evaluation_ledger(job, recipe, phases["forward"])
    if job.workload.save != "none":
        resting = replace(phases["step"], gradients=0, temporaries=library_workspace(job))
        phases["save"] = resting + saving_of(job, recipe, states).device
    return phases


def composed(job: Job, phases: Mapping[str, Ledger], margin: float, reserved: int = 0) -> MemoryEstimate:
    """Return the estimate that follows from the phases; `margin` is the share of the peak that is needed besides.

    `reserved` are the bytes that a caching allocator was seen to reserve for them; 0 leaves them to a share.
    """
    return _composed(job, states_of(job, recipe_of(job)), phases, margin, reserved)


def _composed(
    job: Job, states: States, phases: Mapping[str, Ledger], margin: float, reserved: int = 0
) -> MemoryEstimate:
    even = nominal_states_of(job, recipe_of(job))
    resting = states if is_uneven(states, even) else even
    peak_phase = max(phases, key=lambda name: phases[name].total)
    categories = phases[peak_phase].rounded()
    allocated = sum(categories.values())
    use = device_use(job, allocated, margin, engine_bytes(job, peak_phase), max(reserved, allocated) if reserved else 0)
    return MemoryEstimate(
        **{f"{name}_bytes": value for name, value in categories.items()},
        peak_allocated_bytes=allocated,
        peak_phase=peak_phase,
        peak_reserved_bytes=use.reserved,
        device_overhead_bytes=use.beside,
        device_used_bytes=use.used,
        device_used_upper_bytes=use.upper,
        device_needed_bytes=use.needed,
        device_least_bytes=use.least,
        host_bytes_per_node=round(host_bytes(job, states, use.used)),
        host_load_bytes_per_node=round(host_load_bytes(job)),
        phases={name: round(ledger.total) for name, ledger in phases.items()},
        states={
            "parameters_bytes": round(resting.parameters),
            "gradients_bytes": round(resting.gradients),
            "optimizer_bytes": round(resting.optimizer),
        },
    )


def _accumulated(job: Job) -> float:
    """Whole gradients that a code base keeps beside those its engine reduces."""
    width = code_base(job.workload.code).accumulator.get(stored_precision(job.configuration), 0)
    return width * trained_units_of(job).elements if width else 0.0


def _resting(job: Job, recipe: Recipe, states: States) -> Ledger:
    """Return what is there at every moment of training."""
    rests = Ledger(
        parameters=states.parameters + buffer_bytes(job, recipe),
        optimizer=states.optimizer,
        temporaries=library_workspace(job),
    )
    return rests + critic_bytes(job, recipe, states)


def _phases_of_step(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    """Return the largest moment of each phase of the step."""
    always = _resting(job, recipe, states) + Ledger(gradients=_accumulated(job))
    largest = largest_moments(job, recipe, states)
    return {phase: always + largest[phase] for phase in PHASES if phase in largest}
