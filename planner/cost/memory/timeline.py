"""Moments: an instant's activations together with what the strategy holds at it, as the samples of a micro-batch go up.

Activations grow evenly with the samples and what a strategy holds does not depend on them, so that the moments of a job
are worked out once for all of its micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.cost.memory.activations.instants import Instant, instants_of
from planner.cost.memory.activations.tiled_loss import tiles_of
from planner.cost.memory.ddp import ReplicaBuffers, WholeGradientBuffers
from planner.cost.memory.fsdp import FsdpBuffers, fsdp_buffers
from planner.cost.memory.ledger import Ledger, States
from planner.cost.memory.states import step_temporaries
from planner.cost.memory.zero.deepspeed import zero_buffers
from planner.cost.memory.zero.native import NativeZeroBuffers
from planner.cost.precision import Recipe, has_own_states
from planner.cost.split import keeps_stage_whole, micro_batches_in_flight, reduces_each_micro_batch
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

# Buffers of a strategy at every moment of a step, beside weights, optimizer states and activations.


class Buffers(Protocol):
    """Gradients, buffers and temporaries of one strategy."""

    def at(self, instant: Instant) -> Ledger:
        """Return what is alive at one instant of a micro-batch."""

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Moments at which hardly an activation is alive, each with the phase it belongs to."""


def buffers_of(job: Job, recipe: Recipe, states: States) -> Buffers:
    """Return the buffers of the job's strategy."""
    code = code_base(job.workload.code)
    if code.whole_gradients and has_own_states(code, job.configuration):
        return WholeGradientBuffers(job, recipe)
    if job.configuration.backend == "native":
        return NativeZeroBuffers(job, recipe)
    if job.configuration.zero_stage:
        return zero_buffers(job, recipe)
    step = Ledger(gradients=states.gradients, temporaries=step_temporaries(job, recipe, states))
    if job.configuration.strategy in FSDP_STRATEGIES:
        return _Sharded(_buffers=fsdp_buffers(job, recipe), _step=step)
    return _Replica(_buffers=ReplicaBuffers(job, recipe), _step=step)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replica:
    _buffers: ReplicaBuffers
    _step: Ledger

    def at(self, instant: Instant) -> Ledger:
        return self._buffers.at(instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        return (("step", self._step + Ledger(buffers=self._buffers.buckets)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharded:
    _buffers: FsdpBuffers
    _step: Ledger

    def at(self, instant: Instant) -> Ledger:
        return self._buffers.at(instant)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        return (
            ("forward", self._buffers.before_blocks()),
            ("backward", self._buffers.after_backward()),
            ("step", self._step),
        )


def largest_moments(job: Job, recipe: Recipe, states: States) -> dict[str, Ledger]:
    """Return, by phase, what is alive beside weights and optimizer states at its largest moment."""
    samples = job.sequences
    best: dict[str, tuple[float, _Line]] = {}
    for line in _lines(job, recipe, states):
        total = line.total + samples * line.grows
        if line.phase not in best or total > best[line.phase][0]:
            best[line.phase] = total, line
    return {
        phase: line.ledger + Ledger(activations=line.fixed + samples * line.grows) for phase, (_, line) in best.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """A moment over the samples: the ledger, activations whatever the batch and by sample; `total` without those."""

    phase: str
    ledger: Ledger
    fixed: float
    grows: float
    total: float


class _Alike:
    """Jobs that are the same as far as `key` and the model say."""

    def __init__(self, job: Job, recipe: Recipe, key: tuple[Hashable, ...]) -> None:
        self.job, self.recipe = job, recipe
        self._key = (*key, job.facts.name, job.cluster.device.is_cpu, job.workload.task, job.workload.source_length)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._key == other._key and self._same_model(other.job)

    def _same_model(self, other: Job) -> bool:
        facts, counts = other.facts, other.counts
        if self.job.facts is facts and self.job.counts is counts:
            return True
        return self.job.facts == facts and self.job.facts.traced == facts.traced and self.job.counts == counts


def _lines(job: Job, recipe: Recipe, states: States) -> Sequence[_Line]:
    """Return the lines of a job, for all micro-batches.

    A second one in a step finds gradients, and where they are kept whole one between the first and the last finds them
    all; more of them change nothing.
    """
    chosen = job.configuration
    whole = chosen.strategy == "zero1" or not reduces_each_micro_batch(job)
    steps = min(chosen.gradient_accumulation_steps, 3 if whole else 2)
    degrees = (chosen.dp_replicate, chosen.dp_shard)
    engine = (chosen.strategy, chosen.backend, chosen.sync_each_micro_batch, keeps_stage_whole(job))
    saving = (chosen.offload, chosen.offload_ratio, chosen.gradient_compression, chosen.hpz_partition_size)
    key = (*engine, *saving, degrees, steps, chosen.optimizer, _all_forwards_first(job))
    lines = _CACHE.get(alike := _Alike(job, recipe, (*key, recipe, *_activations_key(job, recipe))))
    if lines is None:
        lines = _CACHE[alike] = _worked_out(job, recipe, states)
        if len(_CACHE) > _REMEMBERED:
            _CACHE.pop(next(iter(_CACHE)))
    return lines


_CACHE: dict[_Alike, Sequence[_Line]] = {}
_REMEMBERED = 512


def _worked_out(job: Job, recipe: Recipe, states: States) -> Sequence[_Line]:
    steps = job.configuration.gradient_accumulation_steps
    if not _all_forwards_first(job):
        return _lines_between(job, job, recipe, states)
    # No gradients yet beside all micro-batches, and all of them beside all but one.
    first = _lines_between(_of_steps(job, 1), job, recipe, states)
    later = _of_steps(job, max(steps - 1, 2))
    return [*first, *(line for line in _lines_between(later, later, recipe, states) if line.phase == "backward")]


def _all_forwards_first(job: Job) -> bool:
    """Return whether a stage runs every micro-batch forward before the first backward.

    It does always in GPipe's order, and in others where there are no more of them than stages ahead.
    """
    steps = job.configuration.gradient_accumulation_steps
    return job.configuration.pp > 1 and 1 < steps <= micro_batches_in_flight(job.configuration, job.stage)


def _of_steps(job: Job, steps: int) -> Job:
    """Return the job with another number of micro-batches."""
    chosen = job.configuration
    batch = chosen.global_batch_size // chosen.gradient_accumulation_steps * steps
    return replace(job, configuration=replace(chosen, gradient_accumulation_steps=steps, global_batch_size=batch))


def _lines_between(held: Job, run: Job, recipe: Recipe, states: States) -> Sequence[_Line]:
    """Return the moments of `run` beside the buffers of `held`."""
    buffers = buffers_of(held, recipe, states)
    lines = [
        _Line(phase=phase, ledger=ledger, fixed=0.0, grows=0.0, total=ledger.total)
        for phase, ledger in buffers.own_moments()
    ]
    if held.configuration.pp > 1 and isinstance(buffers, NativeZeroBuffers) and buffers.keeps_whole:
        # A stage's buckets fill in its last backward pass, beside which no other micro-batch is in flight.
        alone = _of_steps(run, 1)
        between = [(run, buffers.before_last), (alone, buffers.in_last)]
    else:
        between = [(run, buffers.at)]
    for of, ledger_at in between:
        for instant in _instants(_Alike(of, recipe, _activations_key(of, recipe))):
            ledger, (fixed, grows) = ledger_at(instant), instant.activations
            total = ledger.total + fixed
            lines.append(_Line(phase=instant.phase, ledger=ledger, fixed=fixed, grows=grows, total=total))
    return lines


def _activations_key(job: Job, recipe: Recipe) -> tuple[Hashable, ...]:
    """Return what activations depend on: strategies only in the moments that are looked at."""
    chosen = job.configuration
    return (
        (recipe.compute, recipe.residual, recipe.autocast, recipe.gather, recipe.scaled),
        (recipe.weight, recipe.frozen, recipe.quantised, job.workload.freezes),
        (chosen.sequence_length, chosen.attention, chosen.activation_checkpointing, chosen.activations_on_host),
        (chosen.recompute_modules, chosen.checkpoint_every),
        (chosen.tp, chosen.pp, chosen.cp, chosen.ep, chosen.sequence_parallel),
        (chosen.virtual_stages, chosen.layers_per_stage, job.stage),
        (micro_batches_in_flight(chosen, job.stage), chosen.pp_schedule == "gpipe"),
        (chosen.strategy in ("single", "ddp"), chosen.backend == "native"),
        (job.workload.code, job.workload.compile, job.workload.loss, job.workload.expert_imbalance, tiles_of(job)),
        (job.has_reference, job.workload.load_dtype),
    )


@functools.lru_cache(maxsize=256)
def _instants(alike: _Alike) -> Sequence[Instant]:
    return instants_of(alike.job, alike.recipe)
