"""Seconds of a round of post-training: generation, rewards, log-probabilities, optimizer steps and the push of weights.

Everything follows from products, bytes and links; no constant here was fitted to a round. A decoding step reads the
weights of an engine once for all its sequences, and the keys and values of each; its products take as long as any
(Pope et al. 2022, arXiv 2211.05102, section 2), its kernels take turns, and its host sees to each sequence. Lengths of
completions are spread as `PostTraining.surviving` says: an engine decodes as many sequences as its cache has room for
as long as some are waiting, then ever fewer, until the longest ends. docs/explanation/post-training.md compares rounds
with published ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from planner.cost.generation import Engines, engines_of, post_of, scores_again, value_bytes
from planner.cost.timing.collectives import collective_seconds, group
from planner.cost.timing.efficiency import DeviceRates, rates_of
from planner.cost.timing.flops import executed_layers, head_weights, job_stacks
from planner.cost.timing.layout import exposed_seconds, layout
from planner.cost.timing.pipeline import REDUCTIONS_EACH_WAY, boundary_seconds, exchanges, stages
from planner.cost.timing.stacks import Stack
from planner.cost.timing.step import parts_of, parts_of_stages
from planner.models.tasks import facts_for_task
from planner.types.job import Job, counts_of
from planner.types.plan import StepTime
from planner.vocabulary import FSDP_STRATEGIES

_POINTS = 24
"""Moments of the tail of a generation at which a decoding step is worked out."""
SAMPLER_BYTES = 50
"""Of one logit on its way to a token, kernel by kernel: written 2, to fp32 6, temperature 8, softmax 8, log-softmax 8,
exponential noise and the division by it 4 + 12, the largest 2 (vLLM `v1/sample/sampler.py`; counted, not measured)."""
DENSE_KERNELS, EXPERT_KERNELS, SHARED_KERNELS, LATENT_KERNELS = 10, 5, 4, 6
"""Kernels of an engine's block, and those that routed experts, a shared expert and a latent attention add: two norms, a
product of queries, keys and values, rotation, the cache's write, attention, output product, gate and up, activation,
down; the router, its top-k, two that sort tokens, the sum over experts; three and a sum; two norms, a second product of
queries, two of the latent, and the join of what attention split (vLLM's model files; counted, not measured)."""
ENGINE_KERNEL_SECONDS = 5.5e-6
"""Of a kernel in a replayed graph beside what it reads: the geometric mean of three steps of one sequence that others
measured, less their bytes by the rates here. Llama-3.2-1B on an H100 takes 1.48 ms at the least: 3.8 (Stanford's
Hazy Research, "Look Ma, No Bubbles", May 2025); Qwen3-30B-A3B on an A100 9.6 ms: 7.4; DeepSeek-R1 in 4 bits on eight
H100 16.1 ms: 6.1 (vLLM 2025, tenstorrent/tt-inference-server issues 340 and 356)."""
ENGINE_SEQUENCE_SECONDS = 27e-6
"""Of an engine's host for each sequence of a step (scheduler, inputs, outputs), while its GPUs wait: the geometric mean
of 5.5 ms for 256 sequences (vllm-project/vllm issue 10634, November 2024) and 139.6 ms for 4,096 tokens (vLLM 0.27.1,
openfabric-systems/simllm pull 204, whose author calls its spread too wide to certify)."""


def step_time(job: Job) -> StepTime:
    """Seconds of one optimizer step in the steady state, on the busiest rank, by the modules that the job runs.

    Where completions are generated it has its share of the round.
    """
    trained = at_trained_length(job)
    return round_time(trained) if job.workload.generates else parts_of(trained).time


def stage_times(jobs: Sequence[Job]) -> tuple[StepTime, ...]:
    """Return the step as each stage of a pipeline sees it; `jobs` are as those of `parts_of_stages`.

    The longest is the step. Seconds.
    """
    return tuple(parts.time for parts in parts_of_stages([at_trained_length(job) for job in jobs]))


def at_trained_length(job: Job) -> Job:
    """Return the job with samples as long as they are trained on, where completions differ in length.

    transformers' collators pad to the longest of a micro-batch, and GRPO to the longest of all a rank generated; other
    trainers pack.
    """
    post = job.workload.post
    if post is None or post.completion_length == post.completion_max:
        return job
    padded: float = post.completion_length
    if job.workload.code == "transformers":
        generated = post.samples / job.configuration.dims.data_parallel
        padded = post.longest_of(max(round(generated), 1) if job.workload.generates else job.sequences)
    return _at_length(job, post.prompt_length + round(padded))


def _at_length(job: Job, tokens: int) -> Job:
    tokens = max(min(tokens, job.configuration.sequence_length), 1)
    configuration = replace(job.configuration, sequence_length=tokens)
    return replace(job, configuration=configuration, workload=replace(job.workload, sequence_length=tokens))


def round_time(job: Job) -> StepTime:
    """Return the step of a job that generates, with the phases of its round.

    Generation that may run ahead takes place beside everything else, on GPUs of its own.
    """
    post, update = post_of(job), parts_of(job).time
    steps = post.updates(job.configuration.global_batch_size)
    rates = rates_of(job)
    scoring, judging = forward_seconds(job, rates, post.samples), 0.0
    if job.workload.task == "ppo":
        value = value_job(job)
        update = update.scaled(1 + parts_of(value).time.step_seconds / update.step_seconds)
        judging = 2 * forward_seconds(value, rates, post.samples)  # by the reward model, and by the value model
    phases = {
        "generate": generation_seconds(job, rates),
        "reward": judging,
        "reference": scoring if job.has_reference else 0.0,
        "logprob": scoring if scores_again(job) else 0.0,
        "update": steps * update.step_seconds,
        "sync": sync_seconds(job, rates),
    }
    training = sum(seconds for name, seconds in phases.items() if name != "generate")
    ahead = post.steps_off > 0 and post.rollout == "server"
    whole = max(phases["generate"] + phases["sync"], training) if ahead else phases["generate"] + training
    return _step_of_round(update, phases, whole, steps)


def value_job(job: Job) -> Job:
    """Return the training of PPO's value model: the same blocks with a head of one number, and no logits."""
    facts = facts_for_task(job.facts, "reward")
    workload = replace(job.workload, task="seq-cls", loss="plain", post=None)
    return replace(job, facts=facts, workload=workload, counts=counts_of(facts, workload))


def _step_of_round(update: StepTime, phases: Mapping[str, float], whole: float, steps: float) -> StepTime:
    """Return an optimizer step with its share of a round; what is not its own counts as compute, a push as a wait."""
    share = whole / steps
    pushed = min(phases["sync"] / steps, share - update.step_seconds)
    return replace(
        update,
        step_seconds=share,
        compute_seconds=update.compute_seconds + share - update.step_seconds - pushed,
        communication_seconds=update.communication_seconds + pushed,
        exposed_communication_seconds=update.exposed_communication_seconds + pushed,
        phases={name: seconds for name, seconds in phases.items() if seconds},
        round_seconds=whole,
    )


def forward_seconds(job: Job, rates: DeviceRates, samples: int) -> float:
    """Return the seconds of one forward pass without gradients over the samples of a round, as they are spread."""
    chosen = job.configuration
    passes = samples / (chosen.micro_batch_size * chosen.dims.data_parallel)
    kept = replace(chosen, activation_checkpointing="none", recompute_modules="", activations_on_host=False)
    once = replace(job, configuration=kept)
    where, pipeline = layout(once), stages(once, rates)
    busiest = max(pipeline, key=lambda stage: stage.forward)
    inside = exchanges(once, where, busiest, rates)
    one = busiest.forward + inside.forward + boundary_seconds(once, rates)
    if chosen.strategy in FSDP_STRATEGIES or chosen.zero_stage == 3:
        size = where.parameters * where.whole_gather_bytes
        one = busiest.forward + inside.forward
        one += exposed_seconds(one, collective_seconds(job.cluster, "all_gather", size, where.shard_group))
    return (max(passes, 1.0) + chosen.pp - 1) * one


# Generation.


class _Generation:
    """A job as far as its generation depends on it, which is not on how training is spread."""

    def __init__(self, job: Job, rates: DeviceRates) -> None:
        self.job, self.rates = job, rates
        chosen = job.configuration
        ranks = chosen.dims.data_parallel if post_of(job).rollout == "hf" else 0
        self._key = (chosen.precision, chosen.world_size, ranks, job.workload.post, job.workload.code)
        self._compiled = job.workload.compile

    def __hash__(self) -> int:
        return hash((self._key, self._compiled, id(self.job.facts), id(self.job.cluster)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Generation) or (self._key, self._compiled) != (other._key, other._compiled):
            return False
        return self.job.facts is other.job.facts and self.job.cluster is other.job.cluster


def generation_seconds(job: Job, rates: DeviceRates) -> float:
    """Return the seconds in which a round's completions are made, prompts read first."""
    return _generation_seconds(_Generation(job, rates))


@lru_cache(maxsize=256)
def _generation_seconds(generation: _Generation) -> float:
    job, rates = generation.job, generation.rates
    post, engines = post_of(job), engines_of(job)
    prompt = _prefill_seconds(job, engines, rates)
    if post.rollout == "hf":
        steps = post.longest_of(max(round(engines.samples), 1))
        middle = post.prompt_length + steps / 2
        return prompt + steps * decode_seconds(job, engines, rates, sequences=engines.samples, context=middle)
    if post.steps_off > 1:
        return prompt + _steady_seconds(job, engines, rates)
    at_once = max(min(engines.samples, engines.at_a_time), 1.0)
    waiting = (engines.samples - at_once) * post.completion_length / at_once
    usual = post.prompt_length + _mean_position(job)
    full = waiting * decode_seconds(job, engines, rates, sequences=at_once, context=usual) if waiting > 0 else 0.0
    return prompt + full + _last_wave(job, engines, rates, at_once)


def _steady_seconds(job: Job, engines: Engines, rates: DeviceRates) -> float:
    """Return the seconds of a round where others are under way, so that an engine is never without sequences."""
    post = post_of(job)
    under_way = max(min(engines.samples * post.steps_off, engines.at_a_time), 1.0)
    middle = post.prompt_length + _mean_position(job)
    step = decode_seconds(job, engines, rates, sequences=under_way, context=middle)
    return engines.samples * post.completion_length / under_way * step


def _mean_position(job: Job) -> float:
    """Return how far a sequence is on average at a moment that engines are full: half its length, longer ones longer.

    It is the second moment of the length over twice the first, the age of renewal theory.
    """
    post = post_of(job)
    width = post.completion_max / _POINTS
    points = [(index + 0.5) * width for index in range(_POINTS)]
    return sum(point * post.surviving(point) for point in points) / max(sum(map(post.surviving, points)), 1e-9)


def _last_wave(job: Job, engines: Engines, rates: DeviceRates, at_once: float) -> float:
    """Return the seconds from when nothing waits any more: ever fewer sequences, until the longest of all ends."""
    post, everyone = post_of(job), post_of(job).samples
    width, seconds = post.completion_max / _POINTS, 0.0
    for index in range(_POINTS):
        tokens = (index + 0.5) * width
        left = post.surviving(tokens)
        goes_on = 1 - (1 - left) ** everyone
        if goes_on < 1e-4:
            break
        active = max(at_once * left / goes_on, 1.0)
        context = post.prompt_length + tokens
        seconds += width * goes_on * decode_seconds(job, engines, rates, sequences=active, context=context)
    return seconds


def decode_seconds(job: Job, engines: Engines, rates: DeviceRates, *, sequences: float, context: float) -> float:
    """Return the seconds of one token more for each of `sequences`, which are `context` tokens long."""
    tp = engines.tp
    seconds = sum(stack.layers * _block_seconds(job, stack, sequences, tp, rates) for stack in job_stacks(job))
    head = head_weights(job) / tp
    seconds += _product_seconds(2.0 * sequences * head, head + sequences * job.facts.vocab_size / tp, 1, rates)
    kept = sequences * context * engines.token_bytes
    drawn = SAMPLER_BYTES * sequences * job.facts.vocab_size / tp
    seconds += rates.elementwise(kept, kept) + rates.elementwise(drawn, drawn)
    layers = executed_layers(job)
    if tp > 1:
        size = sequences * job.facts.hidden_size * value_bytes(job)
        reduction = collective_seconds(job.cluster, "all_reduce", size, group(job.cluster, tp, 1))
        seconds += (layers * REDUCTIONS_EACH_WAY + 1) * reduction
    if post_of(job).rollout != "hf":
        kernels = sum(stack.layers * _engine_kernels(job, stack) for stack in job_stacks(job))
        return seconds + kernels * ENGINE_KERNEL_SECONDS + sequences * ENGINE_SEQUENCE_SECONDS  # no host launches
    host = layers * rates.code.block_host_seconds
    return seconds + host if rates.serial else max(seconds, host)


def _engine_kernels(job: Job, stack: Stack) -> int:
    """Return how many kernels an engine runs in one block."""
    facts, kernels = job.facts, DENSE_KERNELS
    if facts.is_moe and stack.dispatched:
        kernels += EXPERT_KERNELS + (SHARED_KERNELS if facts.num_shared_experts else 0)
    return kernels + (LATENT_KERNELS if facts.mla else 0)


def _block_seconds(job: Job, stack: Stack, tokens: float, tp: int, rates: DeviceRates) -> float:
    """Return the products of one block on so many tokens: weights are read once, of experts those that a token is for.

    Of E experts, k for each token, E (1 - (1 - k/E)^n) are expected to have one of n tokens.
    """
    facts, matmuls = job.facts, stack.matmuls
    read = matmuls.stored
    if facts.is_moe and stack.dispatched and facts.num_experts > facts.experts_per_token:
        idle = (1 - facts.experts_per_token / facts.num_experts) ** tokens
        others = facts.num_experts - facts.experts_per_token
        busy = (facts.num_experts * (1 - idle) - facts.experts_per_token) / others
        read = matmuls.active + (matmuls.stored - matmuls.active) * min(max(busy, 0.0), 1.0)
    moved = read / tp + tokens * (matmuls.unsplit_width + matmuls.split_width / tp)
    return _product_seconds(2.0 * matmuls.active * tokens / tp, moved, matmuls.kernels, rates)


def _product_seconds(flops: float, moved: float, kernels: float, rates: DeviceRates) -> float:
    """Return the seconds of products that mostly read weights, of which a curve of square ones knows nothing."""
    measured = rates.products(flops, moved, kernels)
    return max(measured, rates.elementwise(moved * rates.element_bytes, moved * rates.element_bytes / max(kernels, 1)))


def _prefill_seconds(job: Job, engines: Engines, rates: DeviceRates) -> float:
    """Return the seconds of reading the prompts of an engine, one after the other."""
    post = post_of(job)
    if not post.prompt_length:
        return 0.0
    tokens = engines.prompts * post.prompt_length
    return sum(stack.layers * _block_seconds(job, stack, tokens, engines.tp, rates) for stack in job_stacks(job))


# The push of new weights to what generates.


def sync_seconds(job: Job, rates: DeviceRates) -> float:
    """Return the seconds of new weights on their way: gathered from shards, sent to other GPUs, written into engines.

    Adapters are merged first and all weights sent (TRL `vllm_generation.py`).
    """
    post, chosen = post_of(job), job.configuration
    size = value_bytes(job) * job.counts.total
    where = layout(job)
    gathered = 0.0
    if chosen.strategy in FSDP_STRATEGIES or chosen.zero_stage == 3:
        gathered = collective_seconds(job.cluster, "all_gather", size, where.shard_group)
    if post.rollout == "hf":
        return gathered
    if chosen.tp * chosen.pp > 1:
        members = group(job.cluster, chosen.tp * chosen.pp, 1)
        gathered = max(gathered, collective_seconds(job.cluster, "all_gather", size, members))
    written = rates.elementwise(2 * size / post.rollout_tp, size / post.rollout_tp)
    if post.rollout == "colocate":
        return gathered + written
    together = replace(job.cluster, nodes=max(math.ceil(post.rollout_gpus / job.cluster.gpus_per_node), 1) + 1)
    members = group(together, post.rollout_gpus + 1, 1)
    return gathered + collective_seconds(together, "broadcast", size, members) + written
