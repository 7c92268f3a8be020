"""Memory of the phases of a round that come before training: generate, reward, reference, old log-probabilities, sync.

Weights, reference and optimizer states rest on the device through all of them, and no gradients; the phases' own
tensors never add up. Code bases other than transformers' (verl, NeMo-RL, OpenRLHF over Megatron or FSDP) move training
states to host memory while engines on the same GPUs generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.cost.code_bases import code_base
from planner.cost.generation import engine_bytes, engines_of, post_of, scores_again
from planner.cost.memory.activations.figures import figures_of
from planner.cost.memory.ledger import Ledger, States, bytes_at
from planner.cost.memory.reference import is_one_unit, reference_casts, unsharded_reference_of
from planner.cost.memory.units import units_of, weight_bytes
from planner.cost.precision import Recipe
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES

TRAINING = ("forward", "loss", "backward", "step")
ROUND = ("generate", "reward", "reference", "logprob", "update", "sync")
"""Phases of a round, in their order."""
SAMPLING_BYTES = 12
"""Per sample and word of HF's `generate`: logits in fp32, their softmax and a copy (`generation/utils.py`, _sample)."""


def with_round(job: Job, recipe: Recipe, phases: dict[str, Ledger], resting: Ledger) -> dict[str, Ledger]:
    """Return the phases of a step with those of its round, engines beside them; `resting` is there through all.

    Raises:
        ContradictoryRequest: as `engines_of`.
    """
    own = {
        "generate": _generate(job, recipe, resting),
        "reward": _reward(job, recipe, resting),
        "reference": _reference(job, recipe, _forward(job, recipe, phases["forward"])),
        "logprob": _forward(job, recipe, phases["forward"]),
        "update": max((phases[name] for name in TRAINING if name in phases), key=_total),
        "sync": resting + Ledger(buffers=_gathered(job, recipe)),
    }
    shown = [name for name in ROUND if _happens(job, name)]
    both = {**{name: phases[name] for name in phases}, **{name: own[name] for name in shown}}
    return {name: _with_engines(job, name, ledger) for name, ledger in both.items()}


def with_traced(job: Job, phases: Mapping[str, Ledger], traced: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return a round's phases with those that a trace of its updates has seen, to which it adds engines beside them.

    Raises:
        ContradictoryRequest: as `engines_of`.
    """
    both = {**phases, **{name: _with_engines(job, name, ledger) for name, ledger in traced.items()}}
    return {**both, "update": max((both[name] for name in TRAINING if name in both), key=_total)}


def _total(ledger: Ledger) -> float:
    return ledger.total


def _with_engines(job: Job, phase: str, ledger: Ledger) -> Ledger:
    taken = engine_bytes(job, phase)
    if phase == "load" or not taken:
        return ledger
    if phase == "generate" and code_base(job.workload.code).name != "transformers":
        return Ledger(buffers=taken)
    return replace(ledger, buffers=ledger.buffers + taken)


def _happens(job: Job, phase: str) -> bool:
    """Return whether a round has a phase that takes memory of its own on GPUs that train."""
    post = post_of(job)
    if phase == "generate":
        return post.rollout != "server"
    if phase == "reward":
        return job.workload.task == "ppo"
    if phase == "reference":
        return job.has_reference
    if phase == "logprob":
        return scores_again(job)
    return phase != "sync" or post.rollout != "hf"


def _is_cut(job: Job) -> bool:
    return job.configuration.strategy in FSDP_STRATEGIES or job.configuration.zero_stage == 3


def _generate(job: Job, recipe: Recipe, resting: Ledger) -> Ledger:
    """Return what HF's `generate` holds: whole weights, the cache of all samples, the last logits and their copies.

    The cache of a layer is copied as it grows by a token (`DynamicCache.update` concatenates). An engine's memory is
    its own to count.
    """
    post = post_of(job)
    if post.rollout != "hf":
        return resting
    engines = engines_of(job)
    layers = max(job.facts.num_layers, 1)
    token = engines.samples * engines.token_bytes
    logits = engines.samples * job.facts.vocab_size * (recipe.compute + SAMPLING_BYTES)
    prompt = _block_bytes(job, recipe, tokens=engines.samples * post.prompt_length)
    at_first, at_last = token * post.prompt_length + prompt, token * post.longest * (1 + 1 / layers) + logits
    return resting + Ledger(activations=max(at_first, at_last), buffers=_whole(job, recipe))


def _whole(job: Job, recipe: Recipe) -> float:
    """Return what whole weights take beside shards while the sharded model generates.

    DeepSpeed's ZeRO-3 gathers all of them (TRL's `ds3_gather_for_generation`), FSDP and our own ZeRO a block at a time
    beside the root.
    """
    if not _is_cut(job):
        return 0.0
    units = units_of(job)
    if job.configuration.zero_stage == 3 and job.configuration.backend == "deepspeed":
        return recipe.gather * units.elements
    return recipe.gather * (units.root.elements + 2 * units.largest_block)


def _gathered(job: Job, recipe: Recipe) -> float:
    """Return what is whole of sharded weights while they are pushed, one unit after the other."""
    units = units_of(job)
    return recipe.gather * max(units.largest_block, units.root.elements) if _is_cut(job) else 0.0


def _reward(job: Job, recipe: Recipe, resting: Ledger) -> Ledger:
    """Return the reward model of PPO, as large as the trained one and whole on each rank in 16 bits."""
    if job.workload.task != "ppo":
        return resting
    return resting + Ledger(parameters=min(recipe.weight, 2) * units_of(job).elements)


def _forward(job: Job, recipe: Recipe, forward: Ledger) -> Ledger:
    """Return a forward pass without gradients over a micro-batch: one block at work, or head and loss."""
    figures = figures_of(job, recipe)
    loss = max((bytes_at(peak.activations, job.sequences) + peak.cast for peak in figures.loss), default=0.0)
    block = _block_bytes(job, recipe, tokens=job.tokens_per_micro_batch)
    begins = bytes_at(figures.before.activations, job.sequences)
    return replace(forward, gradients=0, activations=begins + max(loss, block))


def _reference(job: Job, recipe: Recipe, forward: Ledger) -> Ledger:
    """Return the forward of a reference.

    Accelerate's FSDP2 has it whole in place of a block after the other; autocast keeps copies of what is in fp32.
    """
    if is_one_unit(job):
        return replace(forward, buffers=unsharded_reference_of(job, recipe))
    return replace(forward, activations=forward.activations + reference_casts(job, recipe))


def _block_bytes(job: Job, recipe: Recipe, *, tokens: float) -> float:
    """Return what the largest block works with on so many tokens when it keeps nothing: its input and one half.

    That is the largest moment of its forward, less what earlier blocks keep.
    """
    per_sample = max(job.tokens_per_micro_batch / max(job.sequences, 1), 1)
    largest = 0.0
    for block in figures_of(job, recipe).blocks:
        fixed, grows = max((peak.activations for peak in block.forward), default=block.kept)
        largest = max(largest, block.cast + fixed + (grows + block.boundary[1]) * tokens / per_sample)
    return largest


def critic_bytes(job: Job, recipe: Recipe, states: States) -> Ledger:
    """Return the states of PPO's value model between steps: those of the trained one once more."""
    if job.workload.task != "ppo" or not job.workload.generates:
        return Ledger()
    weights = weight_bytes(job, recipe, sharded=_is_cut(job))
    return Ledger(parameters=weights, optimizer=states.optimizer)
