"""Generation: the engines that make a round's completions, and the memory that weights, keys and values take of each.

An engine is `rollout_tp` GPUs that hold one copy of the weights in 16 bits. Beside those its share of a GPU's memory
holds keys and values in blocks of 16 tokens (vLLM, arXiv 2309.06180, section 4), which decides how many sequences it
decodes at a time. Where the trained model itself generates (`hf`), every rank is an engine for its own samples, all of
which are decoded together.
"""

from __future__ import annotations

from hardware_db.records import dataclass
from hardware_db.units import GIB
from planner.cost.inference import cached_values_per_sequence
from planner.errors import ContradictoryRequest
from planner.types.job import Job
from planner.types.post_training import PostTraining

BLOCK_TOKENS = 16
"""Tokens of a block of keys and values: vLLM's `block_size`."""
MOST_SEQUENCES = 1024
"""Sequences that an engine decodes at a time at most: vLLM's `max_num_seqs` on GPUs of 70 GiB and more."""
ENGINE_BYTES = (0.67 + 1.20) * GIB
"""Of an engine beside weights, keys and values: what is not torch's, and activations (vLLM's own budget of a card,
vllm-project/vllm pull 11743)."""
ASLEEP_BYTES = 0.9 * GIB
"""Of an engine that sleeps: 78.29 of 79.2 GiB were free then (the same)."""
VALUE_BYTES = {"fp32": 4}
"""Of a weight, a key or a value of an engine, where that is not 2."""
FP8_WEIGHT_BYTES = 1.0
"""Of a weight where products are in 8 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """The engines of one round; bytes are those of one GPU."""

    count: int
    tp: int
    samples: float
    """Completions that one of them makes."""
    prompts: float
    """Prompts that one of them reads, the same ones for all their completions once."""
    at_a_time: float
    """Sequences that it decodes at a time at most."""
    weight_bytes: float
    token_bytes: float
    """Of the keys and values of one token, averaged over the longest sample."""
    reserved: float
    """All that it takes of a GPU; 0 where the trained model generates."""


def value_bytes(job: Job) -> float:
    """Return the bytes of a key or a value that is cached."""
    return VALUE_BYTES.get(job.configuration.precision, 2)


def post_of(job: Job) -> PostTraining:
    """Return what post-training adds to a job that generates.

    Raises:
        ContradictoryRequest: the job has no rounds.
    """
    post = job.workload.post
    if post is None or not job.workload.generates:
        raise ContradictoryRequest(f"task {job.workload.task} generates nothing")
    return post


def cache_bytes(job: Job, tokens: int, tp: int) -> float:
    """Return the bytes of keys and values of one sequence on each of `tp` GPUs.

    Heads divide over them as long as there are as many; a latent is on every one.
    """
    by_head, latent = cached_values_per_sequence(job.facts, tokens)
    holders = min(tp, job.facts.num_kv_heads or job.facts.num_heads or tp)
    return value_bytes(job) * (by_head / holders + latent)


def engines_of(job: Job) -> Engines:
    """Return the engines that generate a round's completions.

    Raises:
        ContradictoryRequest: nothing is known of what the model keeps of a sequence, or an engine has no room for
            weights and one sample.
    """
    post, width = post_of(job), value_bytes(job)
    ranks = job.configuration.dims.data_parallel
    per_sample = cache_bytes(job, post.longest, 1)
    if post.rollout == "hf":
        samples = post.samples / ranks
        return Engines(
            count=ranks,
            tp=1,
            samples=samples,
            prompts=samples,
            at_a_time=samples,
            weight_bytes=width * job.counts.total,
            token_bytes=per_sample / post.longest,
            reserved=0.0,
        )
    gpus = post.rollout_gpus or job.configuration.world_size
    tp, count = post.rollout_tp, max(gpus // post.rollout_tp, 1)
    weight = FP8_WEIGHT_BYTES if job.configuration.precision in ("fp8", "fp4") else width
    weights, reserved = weight * job.counts.total / tp, post.rollout_memory * job.cluster.capacity_bytes
    block = cache_bytes(job, post.longest, tp) / post.longest * BLOCK_TOKENS
    blocks = (reserved - weights - ENGINE_BYTES) // block
    longest = -(-post.longest // BLOCK_TOKENS)
    mean = -(-(post.prompt_length + post.completion_length / 2) // BLOCK_TOKENS)
    return Engines(
        count=count,
        tp=tp,
        samples=post.samples / count,
        prompts=max(post.prompts_per_step / count, 1.0),
        # Blocks are taken as a sequence grows: at any moment it is half as long on average, and one can be the longest.
        at_a_time=min(MOST_SEQUENCES, blocks / mean) if blocks >= longest else 0.0,
        weight_bytes=weights,
        token_bytes=block / BLOCK_TOKENS,
        reserved=reserved,
    )


def engine_need(job: Job) -> float:
    """Return the bytes that an engine needs of each GPU at the least: weights, its own, and one longest sample."""
    post, engines = post_of(job), engines_of(job)
    return engines.weight_bytes + ENGINE_BYTES + engines.token_bytes * post.longest


def engine_bytes(job: Job, phase: str) -> float:
    """Return what engines take of a GPU that trains, in one phase of a round."""
    post = job.workload.post
    if post is None or not job.workload.generates or post.rollout != "colocate":
        return 0.0
    reserved = post.rollout_memory * job.cluster.capacity_bytes
    if not post.rollout_sleep or phase == "generate":
        return reserved
    if phase == "sync":  # weights are woken first, keys and values once they are there
        return min(reserved, ENGINE_BYTES + value_bytes(job) * job.counts.total / post.rollout_tp)
    return ASLEEP_BYTES


def scores_again(job: Job) -> bool:
    """Return whether a round takes the log-probabilities of its samples again before it trains on them.

    It does for what an engine sampled, whose arithmetic is another, and where several optimizer steps train on one
    round (TRL 1.16 `grpo_trainer.py`, _generate_and_score_completions).
    """
    post = post_of(job)
    return post.rollout != "hf" or post.updates(job.configuration.global_batch_size) > 1
