"""The split of a model and its tokens over ranks, as memory and time both need it.

It has the stages of a pipeline with the micro-batches each holds at once, what the ranks of one sample exchange for
attention, and what experts get.

Blocks are dealt out over `pp` ranks, or over `pp x virtual_stages` pieces of which a rank has every `pp`-th. What does
not divide goes to the pieces in the middle first: the ends have the embedding and the head besides (Llama 3's 126
blocks over 16 stages, arXiv 2407.21783, section 3.3.2; Megatron-LM's `--account-for-embedding-in-pipeline-split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from planner.cost.code_bases import code_base
from planner.errors import ContradictoryRequest
from planner.models.facts import ModelFacts
from planner.types.job import Job
from planner.types.plan import Configuration

# Stages of a pipeline.


_MIXED = frozenset({"local", "global"})
"""Kinds of blocks that take turns, so that every stage has some of each."""


def recomputed_blocks(chosen: Configuration, blocks: int) -> int:
    """Return how many of so many blocks in a row full checkpointing recomputes: the first, and every K-th after."""
    return -(-blocks // chosen.checkpoint_every) if chosen.activation_checkpointing == "full" else 0


@lru_cache(maxsize=256)
def blocks_per_piece(blocks: int, pieces: int) -> tuple[int, ...]:
    """Return how many of the blocks each piece of the model has, in the order of the model."""
    each, more = divmod(blocks, pieces)
    from_middle = sorted(range(pieces), key=lambda piece: (piece == pieces - 1, piece == 0, piece))
    larger = set(from_middle[:more])
    return tuple(each + (piece in larger) for piece in range(pieces))


@lru_cache(maxsize=256)
def blocks_per_stage(blocks: int, *, pp: int, virtual_stages: int = 1, named: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return how many of the blocks each rank of the pipeline has; `named` is what a plan says of each piece.

    Raises:
        ContradictoryRequest: the plan names other blocks than there are.
    """
    pieces = _pieces(blocks, pp * virtual_stages, named)
    return tuple(sum(pieces[stage::pp]) for stage in range(pp))


def _pieces(blocks: int, pieces: int, named: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of the blocks each piece has: as the plan says, else dealt out."""
    if not named:
        return blocks_per_piece(blocks, pieces)
    if problem := why_other_layers(named, blocks):
        raise ContradictoryRequest(problem)
    return named


def why_other_layers(named: tuple[int, ...], blocks: int, model: str = "the model") -> str | None:
    """Return why the blocks that a plan names of each piece are not the model's; None where they are, or it has none.

    `blocks` are those of the model.
    """
    if not named or sum(named) == blocks:
        return None
    layers = ",".join(map(str, named))
    return f"layers_per_stage {layers} are {sum(named)} blocks, and {model} has {blocks}; name each of them once"


@lru_cache(maxsize=1024)
def kinds_on_stage(
    kinds: tuple[tuple[str, int], ...], *, pp: int, virtual_stages: int, stage: int, named: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return how many blocks of each kind a rank has; `kinds` are the names and numbers in the order of the model.

    `named` is what a plan says of each piece.
    """
    total = sum(count for _, count in kinds)
    if pp == 1:
        return tuple(count for _, count in kinds)
    if total and all(name in _MIXED for name, _ in kinds):
        each = blocks_per_stage(total, pp=pp, virtual_stages=virtual_stages, named=named)
        return _in_proportion([count for _, count in kinds], each[stage])
    pieces = _pieces(total, pp * virtual_stages, named)
    ranges = list(pairwise(accumulate(pieces, initial=0)))[stage::pp]
    ends = pairwise(accumulate((count for _, count in kinds), initial=0))
    return tuple(sum(max(0, min(stop, last) - max(start, first)) for start, stop in ranges) for first, last in ends)


def _in_proportion(counts: Sequence[int], some: int) -> tuple[int, ...]:
    total, left, parts = sum(counts), some, []
    for index, count in enumerate(counts):
        part = left if index == len(counts) - 1 else min(left, round(some * count / total))
        parts.append(part)
        left -= part
    return tuple(parts)


def micro_batches_in_flight(configuration: Configuration, stage: int) -> float:
    """Micro-batches whose activations a rank holds at once, of its whole part of the model each.

    GPipe runs every forward first; 1F1B and ZB-H1 (arXiv 2401.10241, section 3) hold one for each stage from here to
    the last. An interleaved pipeline warms up with `2 (pp - stage - 1) + (v - 1) pp` pieces of a v-th and runs one more
    (Megatron-LM, `megatron/core/pipeline_parallel/schedules.py`, get_pp_rank_microbatches).
    """
    pp, steps = configuration.pp, configuration.gradient_accumulation_steps
    if pp == 1:
        return 1.0
    if configuration.pp_schedule == "gpipe":
        return float(steps)
    pieces = configuration.virtual_stages
    if configuration.pp_schedule == "interleaved" and pieces > 1:
        return min(steps * pieces, 2 * (pp - stage - 1) + (pieces - 1) * pp + 1) / pieces
    return float(min(steps, pp - stage))


def stages_looked_at(configuration: Configuration) -> tuple[int, ...]:
    """Return the stages of which one is the busiest in memory.

    They are the first, which holds the most micro-batches and the embedding; the one after it, which may have a block
    more; the last, which has the head and the loss. Where the plan names the blocks of each, they are the first of
    every number of blocks, which holds more micro-batches than those after it.
    """
    pp, named = configuration.pp, configuration.stage_layers
    if named:
        each = [sum(named[stage::pp]) for stage in range(pp)]
        first_with = {layers: stage for stage, layers in reversed(list(enumerate(each)))}
        return tuple(sorted({0, *first_with.values(), pp - 1}))
    return tuple(dict.fromkeys((0, min(1, pp - 1), pp - 1)))


# Context parallelism: every rank has a part of each sample's tokens, and attention needs the keys of all.


AttentionExchange = Literal["all-gather", "ring", "all-to-all"]
"""How keys reach queries: all-gathered at once (torch's `context_parallel`, torchtitan's and accelerate's default),
sent around a ring beside the attention of what is there (Transformer Engine's `p2p`, Megatron-LM's default), or heads
exchanged for tokens before and after it (DeepSpeed-Ulysses, arXiv 2309.14509)."""
_RINGS = frozenset({"megatron", "nemo", "nanotron"})
_FP32_OUTPUT = 2
"""Elements of 16 bits that one of the partial output takes while it is merged in fp32."""


def attention_exchange(job: Job) -> AttentionExchange:
    """Return the exchange of a job's code."""
    if job.configuration.backend == "deepspeed" or job.workload.code == "megatron-deepspeed":
        return "all-to-all"
    return "ring" if job.workload.code in _RINGS else "all-gather"


def keeps_stage_whole(job: Job) -> bool:
    """Return whether FSDP neither frees a stage's weights nor reduces its gradients before the last micro-batch.

    Each micro-batch of a step would all-gather them again otherwise.
    """
    return job.configuration.pp > 1 and code_base(job.workload.code).whole_stages


def reshards_weights(job: Job) -> bool:
    """Return whether FSDP frees a unit's weights between its uses."""
    return job.configuration.strategy != "fsdp-grad-op" and not keeps_stage_whole(job)


def reduces_each_micro_batch(job: Job) -> bool:
    """Return whether FSDP reduces gradients in every micro-batch."""
    return job.configuration.sync_each_micro_batch and not keeps_stage_whole(job)


def logit_parts(job: Job) -> int:
    """Return the ranks among which the logits of a token are split.

    Of transformers' models `dsplan.initialize` splits those of causal language models with their own loss
    (`strategies/parallel/tensor.py`); transformers' plans gather the others on every tp rank (`lm_head:
    colwise_gather_output`, `transformers/modeling_utils.py` of 5.23). All other code bases compute a split loss.
    """
    work = job.workload
    is_split = work.task == "causal-lm" and work.loss == "plain" and job.facts.kind == "decoder"
    return job.configuration.tp if work.code != "transformers" or is_split else 1


def keeps_sequence_shards(job: Job) -> bool:
    """Return whether a column-parallel product keeps its part of the input and all-gathers it again in backward."""
    block = code_base(job.workload.code).traits(compiled=job.workload.compile).block
    return block is not None and block.keeps_sequence_shards


def attention_widths(facts: ModelFacts, tp: int) -> tuple[float, float]:
    """Elements per token of the queries (or the output), and of keys and values together, on one tp rank."""
    heads, groups = max(facts.num_heads / tp, 1), max(facts.num_kv_heads / tp, 1)
    if facts.mla is None:
        return heads * facts.head_dim, 2 * groups * facts.head_dim
    mla = facts.mla
    return heads * mla.v_head_dim, heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def exchange_elements(facts: ModelFacts, exchange: AttentionExchange, tp: int, cp: int) -> tuple[float, float]:
    """Return elements per token of the whole sample that the exchange takes, in forward and in backward.

    They are beside a block's own tensors.

    All-gathered keys and values lie beside the copy that was sent; around a ring two parts of them are under way, and
    of their gradients as many in backward. Partial outputs are merged in fp32. Exchanged heads are a second copy.
    """
    if cp == 1:
        return 0.0, 0.0
    queries, keys = (width / cp for width in attention_widths(facts, tp))
    if exchange == "all-to-all":
        return queries + keys, 2 * queries + keys
    merged = (1 + _FP32_OUTPUT) * queries
    under_way = (cp + 1) * keys if exchange == "all-gather" else 2 * keys
    return under_way + merged, under_way + 2 * keys + queries
