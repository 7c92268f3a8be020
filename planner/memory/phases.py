"""Phases of one step, each a ledger; the largest is the peak."""

from __future__ import annotations

from collections.abc import Mapping

from planner.job import Job
from planner.memory.activations import Activations, activations_of
from planner.memory.ledger import Ledger, Transients
from planner.memory.load import load_of
from planner.memory.overhead import (
    FRAGMENTATION,
    FRAGMENTATION_UPPER,
    device_overhead,
    host_bytes,
    library_workspace,
)
from planner.memory.recipe import Recipe, recipe_of
from planner.memory.states import States, nominal_states_of, states_of
from planner.memory.transients import transients_of
from planner.plan import MemoryEstimate


def memory_estimate(job: Job) -> MemoryEstimate:
    """Bytes on the busiest rank in the steady state, by category and phase, and what the process uses beyond them."""
    return composed(job, phases_of(job), FRAGMENTATION_UPPER)


def phases_of(job: Job) -> dict[str, Ledger]:
    """What is alive on the busiest rank at the peak of each phase."""
    recipe = recipe_of(job.configuration)
    states = states_of(job, recipe)
    return {"load": load_of(job, recipe, states).device, **_phases(job, recipe, states)}


def composed(job: Job, phases: Mapping[str, Ledger], margin: float) -> MemoryEstimate:
    """The estimate that follows from the phases; `margin` is the share of the peak that its upper bound adds."""
    recipe = recipe_of(job.configuration)
    states, nominal = states_of(job, recipe), nominal_states_of(job, recipe)
    peak_phase = max(phases, key=lambda name: phases[name].total)
    categories = phases[peak_phase].rounded()
    allocated = sum(categories.values())
    overhead = device_overhead(job)
    reserved, beside = round(allocated * (1 + FRAGMENTATION)), round(overhead.expected)
    used = reserved + beside
    upper = allocated * (1 + margin) + overhead.upper
    return MemoryEstimate(
        **{f"{name}_bytes": value for name, value in categories.items()},
        peak_allocated_bytes=allocated,
        peak_phase=peak_phase,
        peak_reserved_bytes=reserved,
        device_overhead_bytes=beside,
        device_used_bytes=used,
        device_used_upper_bytes=round(upper),
        host_bytes_per_node=round(host_bytes(job, states, used)),
        phases={name: round(ledger.total) for name, ledger in phases.items()},
        states={
            "parameters_bytes": round(nominal.parameters),
            "gradients_bytes": round(nominal.gradients),
            "optimizer_bytes": round(nominal.optimizer),
        },
    )


def _phases(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    activations = activations_of(job, recipe)
    transients = transients_of(job, recipe, states)
    always = Ledger(
        parameters=states.parameters,
        optimizer=states.optimizer,
        buffers=transients.resident,
        temporaries=library_workspace(job),
    )
    all_gradients = Ledger(gradients=max(states.gradients, transients.accumulated))
    waiting = all_gradients if job.configuration.gradient_accumulation_steps > 1 else Ledger()
    forward = (
        always + waiting + Ledger(activations=activations.kept, buffers=transients.forward, temporaries=transients.cast)
    )
    return {
        "forward": forward,
        "loss": forward + Ledger(activations=activations.loss),
        "backward": _backward(job, recipe, always + waiting, (activations, transients, states)),
        "step": always + Ledger(gradients=states.gradients, temporaries=transients.step),
    }


Parts = tuple[Activations, Transients, States]


def _backward(job: Job, recipe: Recipe, before: Ledger, parts: Parts) -> Ledger:
    """The largest of three moments: the first block's backward, the last one's, and that of the token table."""
    moments = (
        _first_block(job, recipe, before, parts),
        _last_block(job, recipe, before, parts),
        _token_table(job, recipe, before, parts),
    )
    return max(moments, key=lambda ledger: ledger.total)


def _first_block(job: Job, recipe: Recipe, before: Ledger, parts: Parts) -> Ledger:
    """All activations, and no gradients but the head's."""
    activations, transients, states = parts
    head = recipe.gradient * (job.counts.head or _table(job)) * _kept_share(recipe, states)
    return before + Ledger(
        gradients=0 if before.gradients else min(head, states.gradients),
        activations=activations.kept + activations.working,
        buffers=transients.backward,
        temporaries=transients.cast_in_backward,
    )


def _last_block(job: Job, recipe: Recipe, before: Ledger, parts: Parts) -> Ledger:
    """One block's activations, and all gradients but the token table's, which are not made yet unless it is tied."""
    activations, transients, states = parts
    later = 0.0 if _tied(job) else recipe.gradient * _table(job) * _kept_share(recipe, states)
    return before + Ledger(
        gradients=0 if before.gradients else max(states.gradients - later, 0.0),
        activations=activations.last_block,
        buffers=transients.backward,
    )


def _token_table(job: Job, recipe: Recipe, before: Ledger, parts: Parts) -> Ledger:
    """All gradients. A tied table's second gradient and the sum of both are made beside the first (traced)."""
    _, transients, states = parts
    return before + Ledger(
        gradients=0 if before.gradients else states.gradients,
        buffers=transients.backward,
        temporaries=recipe.gradient * _table(job) * 2 if _tied(job) else 0.0,
    )


def _kept_share(recipe: Recipe, states: States) -> float:
    """Share of a gradient that its rank keeps once it is reduced."""
    return states.local / states.elements if states.gradients < recipe.gradient * states.elements else 1.0


def _tied(job: Job) -> bool:
    return job.facts.tie_word_embeddings and job.facts.kind != "custom"


def _table(job: Job) -> float:
    """Elements of the token table on one device; none where it belongs to the smaller of two towers."""
    if job.facts.kind == "vision-text":
        return 0.0
    return job.facts.vocab_size * job.facts.hidden_size / job.configuration.tp
