"""Memory of ranks that have a part of the model or of the tokens: stages, tp with and without sequence parallelism, cp
and ep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost.memory.activations.form import WHOLE, Spread, per_rank
from planner.cost.memory.activations.instants import instants_of
from planner.cost.memory.estimate import memory_estimate
from planner.cost.memory.states import states_of
from planner.cost.memory.units import shards_of, units_of
from planner.cost.precision import recipe_of
from planner.cost.split import blocks_per_stage, exchange_elements, kinds_on_stage, micro_batches_in_flight
from planner.models.catalogue import find_model
from planner.models.counting.count import count_parameters
from planner.types.job import Job, Workload
from planner.types.plan import Configuration, MemoryEstimate
from tests.planner.cost.timing.cases import cluster

LAYER = {"b h s": 10, "a b d s": 8, "b f s": 4, "a b s s": 5}
"""Bytes that a GPT layer keeps by Korthikanti et al. 2022 (arXiv 2205.05198, equation 1): sbh 34 + 5 as²b."""


def job(model: str, *, stage: int = 0, **options: Any) -> Job:
    """One sample per rank and micro-batch."""
    facts = find_model(model)
    options = {"strategy": "fsdp", "gradient_accumulation_steps": 1, "sequence_length": 2048, **options}
    zero = str(options["strategy"]).startswith("zero")
    steps, data = options["gradient_accumulation_steps"], options.get("dp_shard", 1) * options.get("dp_replicate", 1)
    configuration = Configuration(
        backend="deepspeed" if zero else "torch",
        micro_batch_size=1,
        global_batch_size=steps * data,
        precision="bf16",
        optimizer="adamw-fused",
        **options,
    )
    workload = Workload(task="causal-lm", sequence_length=configuration.sequence_length, global_batch_size=steps * data)
    return Job(
        facts=facts,
        counts=count_parameters(facts),
        workload=workload,
        cluster=cluster(),
        configuration=configuration,
        stage=stage,
    )


def memory(model: str, **options: Any) -> MemoryEstimate:
    return memory_estimate(job(model, **options))


@pytest.mark.parametrize(
    ("blocks", "pp", "virtual", "expected"),
    [
        (32, 4, 1, (8, 8, 8, 8)),
        # Llama 3 405B: 126 blocks over 16 stages, one less on the first and on the last (arXiv 2407.21783, 3.3.2).
        (126, 16, 1, (7, *[8] * 14, 7)),
        (126, 16, 8, (7, *[8] * 14, 7)),
        (61, 16, 1, (3, *[4] * 13, 3, 3)),
        (7, 4, 1, (2, 2, 2, 1)),
    ],
)
def test_what_does_not_divide_goes_to_the_middle(blocks: int, pp: int, virtual: int, expected: tuple[int, ...]) -> None:
    assert blocks_per_stage(blocks, pp=pp, virtual_stages=virtual) == expected


def test_a_stage_has_the_kinds_of_its_place() -> None:
    kinds = (("dense", 3), ("expert", 5))
    assert [kinds_on_stage(kinds, pp=2, virtual_stages=1, stage=stage) for stage in range(2)] == [(3, 1), (0, 4)]
    assert [kinds_on_stage(kinds, pp=2, virtual_stages=2, stage=stage) for stage in range(2)] == [(2, 2), (1, 3)]
    # Kinds that alternate are on every stage.
    assert kinds_on_stage((("local", 20), ("global", 4)), pp=2, virtual_stages=1, stage=1) == (10, 2)


@pytest.mark.parametrize(
    ("schedule", "virtual", "stage", "steps", "expected"),
    [
        ("gpipe", 1, 3, 12, 12),
        ("1f1b", 1, 0, 12, 4),
        ("1f1b", 1, 3, 12, 1),
        ("1f1b", 1, 0, 2, 2),
        ("zero-bubble", 1, 1, 12, 3),
        # Megatron-LM: 2 (4 - 0 - 1) + (2 - 1) 4 + 1 = 11 pieces of half a stage, 5 on the last.
        ("interleaved", 2, 0, 12, 11 / 2),
        ("interleaved", 2, 3, 12, 5 / 2),
    ],
)
def test_schedules_hold_micro_batches(schedule: Any, virtual: int, stage: int, steps: int, expected: float) -> None:
    chosen = job(
        "llama-3-8b", pp=4, pp_schedule=schedule, virtual_stages=virtual, gradient_accumulation_steps=steps
    ).configuration
    assert micro_batches_in_flight(chosen, stage) == expected


@pytest.mark.parametrize(("model", "tables"), [("llama-3-8b", 1), ("llama-3.2-1b", 2)])
@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_have_the_model_between_them(model: str, tables: int, virtual: int) -> None:
    """A head that is tied to the token table has a copy of it on the last stage."""
    stages = [job(model, pp=4, virtual_stages=virtual, stage=stage) for stage in range(4)]
    parts = [units_of(stage) for stage in stages]
    counts = stages[0].counts
    assert sum(part.elements for part in parts) == counts.total + (tables - 1) * counts.embedding
    assert [bool(part.root.shapes) for part in parts] == [True, False, False, True]
    # The last stage's root is norm and head, the first one's the table.
    assert parts[3].root.elements == counts.head + counts.other + (tables - 1) * counts.embedding
    assert parts[0].root.elements == counts.embedding


def test_only_the_last_stage_has_a_loss_and_only_the_first_a_table() -> None:
    options = {"pp": 4, "gradient_accumulation_steps": 8}
    units = []
    for stage in range(4):
        here = job("llama-3-8b", stage=stage, **options)
        units.append({instant.unit for instant in instants_of(here, recipe_of(here))})
    assert units == [{"block", "table"}, {"block"}, {"block"}, {"block", "head"}]


def test_the_busiest_stage_counts() -> None:
    """The first stage's micro-batches in flight are the peak of a long pipeline, the last one's logits of a short one
    with full recomputation."""
    deep = memory("llama-3-8b", pp=4, gradient_accumulation_steps=8)
    assert deep.activations_bytes > 0.9 * memory("llama-3-8b").activations_bytes
    gpipe, flushed = (
        memory("llama-3-8b", pp=4, gradient_accumulation_steps=8, pp_schedule=name) for name in ("gpipe", "zero-bubble")
    )
    assert flushed == deep
    assert gpipe.activations_bytes > 1.7 * deep.activations_bytes
    interleaved = memory("llama-3-8b", pp=4, gradient_accumulation_steps=8, pp_schedule="interleaved", virtual_stages=2)
    # 5.5 micro-batches in flight over 4.
    assert interleaved.activations_bytes / deep.activations_bytes == pytest.approx(5.5 / 4, rel=0.03)


@pytest.mark.parametrize("tp", [2, 8])
def test_sequence_parallelism_divides_what_tensor_parallelism_leaves(tp: int) -> None:
    """Korthikanti et al. 2022, table 2: sbh (10 + 24 / t + 5 as / ht) with tensor parallelism, all over t with both."""
    heads, width, length = 32, 128, 512
    hidden = heads * width
    sizes = {"h": hidden, "a": heads / tp, "d": width, "f": 4 * hidden / tp, "s": length}
    stream, scores = length * hidden, 5 * heads * length**2
    assert per_rank(LAYER, sizes, WHOLE)[1] == pytest.approx(stream * (10 + 24 / tp) + scores / tp)
    assert per_rank(LAYER, sizes, Spread(tp=tp))[1] == pytest.approx((34 * stream + scores) / tp)
    assert per_rank(LAYER, sizes, Spread(tp=tp, cp=4))[1] == pytest.approx((34 * stream + scores) / tp / 4)


def test_a_rank_has_whole_key_heads() -> None:
    """Llama 3 8B has 8 key heads: over 16 ranks each has one, and the keys repeated for 2 query heads."""
    split = job("llama-3-8b", tp=16, attention="eager")
    one, half = (
        states_of(replace(split, configuration=replace(split.configuration, tp=tp)), recipe_of(split)).elements
        for tp in (16, 8)
    )
    assert one < 0.51 * half
    assert memory("llama-3-8b", tp=16, attention="eager").activations_bytes > 0


def test_norms_are_on_every_rank() -> None:
    counts = job("llama-3-8b").counts
    norms = (2 * 32 + 1) * 4096
    assert units_of(job("llama-3-8b", tp=4)).elements == (counts.total - norms) / 4 + norms


def test_context_parallel_ranks_share_states_and_tokens() -> None:
    alone, shared = memory("llama-3-8b", dp_shard=8), memory("llama-3-8b", dp_shard=1, cp=8)
    assert shared.states == alone.states
    longer = memory("llama-3-8b", cp=8, sequence_length=8 * 2048)
    # The same tokens on every rank, and what one block exchanges of the others'.
    assert alone.activations_bytes <= longer.activations_bytes < 1.1 * alone.activations_bytes


def test_around_a_ring_fewer_keys_lie_beside_a_block_than_all_gathered() -> None:
    """Llama 3 8B's keys and values, 2 x 8 x 128 elements a token: of 8 ranks and the part that is sent with them, or of
    two under way around a ring."""
    facts, keys = find_model("llama-3-8b"), 2 * 8 * 128
    gathered, ring = (exchange_elements(facts, exchange, 1, 8) for exchange in ("all-gather", "ring"))
    assert [more - less for more, less in zip(gathered, ring, strict=True)] == [keys * 7 / 8] * 2
    assert exchange_elements(facts, "all-gather", 1, 1) == (0, 0)
    split = job("llama-3-8b", cp=8, sequence_length=8 * 2048, activation_checkpointing="full")
    beside = []
    for cp in (1, 8):
        chosen = replace(split.configuration, cp=cp, sequence_length=cp * 2048)
        here = replace(split, configuration=chosen)
        blocks = [instant for instant in instants_of(here, recipe_of(here)) if instant.phase == "forward"]
        beside.append(max(instant.activations[1] for instant in blocks))
    # A gathered part's output is merged by heads, and the output projection's input is a copy: 32 x 128 a token.
    assert beside[1] - beside[0] == pytest.approx(2 * (16384 * gathered[0] + 2048 * 32 * 128))


def test_experts_are_spread_over_ranks() -> None:
    """Mixtral's 8 experts over 64 ranks: FSDP2 deals out whole experts, so that an eighth is the least; spread over 8
    ranks first, each expert is cut into 8."""
    dealt, spread = (shards_of(job("mixtral-8x7b", dp_shard=64, ep=ep)) for ep in (1, 8))
    experts = job("mixtral-8x7b").counts.blocks[0].experts * 32
    assert dealt.experts == experts / 8
    assert spread.experts == dealt.experts  # one expert cannot be cut in dimension 0
    split = job("mixtral-8x7b", dp_shard=64, ep=8)
    titan = replace(split, workload=replace(split.workload, code="torchtitan"))
    assert shards_of(titan).experts == experts / 64
    zero = states_of(job("mixtral-8x7b", strategy="zero1", dp_shard=64, ep=8), recipe_of(split))
    dense = units_of(split).elements - units_of(split).experts
    assert units_of(split).experts == experts / 8
    assert zero.stepped == pytest.approx(dense / 64 + experts / 64)


def test_expert_and_tensor_parallel_experts_are_of_one_size() -> None:
    one = units_of(job("mixtral-8x7b", tp=8)).experts
    assert units_of(job("mixtral-8x7b", tp=8, ep=8)).experts == one
