"""The memory of ZeRO against sums by hand from DeepSpeed's code; test_memory_measured compares whole steps."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.states import states_of
from planner.cost.memory.zero.deepspeed import zero_buffers
from planner.cost.memory.zero.partition import FlatPartition, flat_partition, tensor_partitions
from planner.cost.precision import recipe_of
from planner.cost.zero_bucket_sizes import ZeroBuckets
from planner.models.counting.count import count_parameters
from planner.models.from_hf.config import facts_from_config
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from planner.types.plan import Configuration

H, F, V, LAYERS, RANKS = 64, 128, 512, 3, 2
BLOCK = 4 * H * H + 3 * H * F + 2 * H
WHOLE = 2 * V * H + LAYERS * BLOCK + H
MODEL = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": V,
    "tie_word_embeddings": False,
}


def job(strategy: str, *, ranks: int = RANKS, gpu: str = "A100-SXM4-80GB", **how: Any) -> Job:
    steps = how.get("gradient_accumulation_steps", 1)
    configuration = Configuration(
        **{
            "strategy": strategy,
            "backend": "deepspeed",
            "dp_shard": ranks,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "global_batch_size": ranks * steps,
            "sequence_length": 128,
            "precision": "bf16",
            "optimizer": "adamw",
            **how,
        }
    )
    facts = facts_from_config(MODEL, "small")
    cluster = resolve_cluster(HardwareRequest(gpu=gpu, gpus=ranks))
    request = make_request(facts, cluster, WorkOptions(seq_len=128, global_batch=configuration.global_batch_size))
    return Job(
        facts=facts,
        counts=count_parameters(facts),
        workload=request.workload,
        cluster=cluster,
        configuration=configuration,
    )


def at(subject: Job, **moment: Any) -> Any:
    instant = Instant(**{"phase": "backward", "unit": "block", "activations": 0.0, "cast": 0.0, **moment})
    return zero_buffers(subject, recipe_of(subject)).at(instant)


def own(subject: Job, phase: str) -> Any:
    moments = zero_buffers(subject, recipe_of(subject)).own_moments()
    return max((ledger for name, ledger in moments if name == phase), key=lambda ledger: ledger.total)


def test_the_flat_group_is_cut_evenly_and_touched_tensors_count_whole() -> None:
    """Two ranks cut the third block's tensors; the first rank touches the embedding and all before that cut."""
    flat = flat_partition(job("zero2"))
    assert flat == FlatPartition(whole=WHOLE, size=WHOLE // 2, touched=flat.touched, largest=V * H)
    assert WHOLE // 2 <= flat.touched <= WHOLE // 2 + V * H
    odd = flat_partition(job("zero2", ranks=3))
    assert (odd.size, odd.whole) == (-(-WHOLE // 6) * 2, -(-WHOLE // 6) * 6)


def test_every_tensor_is_cut_and_small_ones_stay_whole() -> None:
    three = tensor_partitions(job("zero3", ranks=3), persistence_threshold=10 * H)
    matrices = [V * H, V * H, *LAYERS * (4 * [H * H] + 3 * [H * F])]
    vectors = (2 * LAYERS + 1) * [H]
    assert three.local == sum(-(-size // 3) for size in matrices + vectors)
    assert three.persisted == sum(vectors)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_buckets_come_with_the_first_gradient_and_hold_the_others(strategy: str) -> None:
    subject = job(strategy)
    assert at(subject).total == 0
    ledger = at(subject, unit_gradients=H * F, done_gradients=V * H)
    assert ledger.buffers == pytest.approx(2 * 2 * WHOLE, rel=1e-3), "two buckets of the whole model, in bf16"
    assert ledger.gradients == 2 * H * F, "only the newest is a tensor of its own"
    assert ledger.temporaries == 0


def test_a_full_bucket_is_copied_only_where_ranks_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank owns what backward makes first; a bucket of a quarter of the model is within its half at first."""
    quarter = WHOLE // 4
    buckets = ZeroBuckets(reduce=quarter, allgather=WHOLE)
    monkeypatch.setattr("planner.cost.memory.zero.deepspeed.zero_buckets", lambda *_, **__: buckets)
    subject, touched = job("zero2"), flat_partition(job("zero2")).touched
    filling, own_part, shared = (at(subject, done_gradients=share * WHOLE) for share in (0.2, 0.3, 0.6))
    assert (filling.gradients, filling.temporaries) == (0, 0)
    assert (own_part.gradients, own_part.temporaries) == (pytest.approx(2 * touched, abs=512), 0)
    assert shared.temporaries == 2 * quarter
    assert shared.buffers == pytest.approx(2 * 2 * quarter, abs=1024)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_step_casts_the_gradients_and_lets_the_optimizer_copy_them(strategy: str) -> None:
    """fp32 gradients of the partition with AdamW's copy, or before that the bf16 ones, flat and cast."""
    part, touched = WHOLE / RANKS, flat_partition(job(strategy)).touched
    step = own(job(strategy), "step")
    assert step.total == pytest.approx(max(4 * part + 4 * part, 2 * touched + (2 + 4) * part), rel=0.01)
    fused = own(job(strategy, optimizer="adamw-fused"), "step")
    assert fused.total == pytest.approx(2 * touched + (2 + 4) * part, rel=0.01)


def test_stage_1_accumulates_whole_gradients_and_stage_2_its_part() -> None:
    first, second = (at(job(strategy, gradient_accumulation_steps=2)) for strategy in ("zero1", "zero2"))
    assert (first.gradients, first.buffers) == (2 * WHOLE, pytest.approx(4 * WHOLE, rel=1e-3))
    assert second.gradients == pytest.approx(2 * flat_partition(job("zero2")).touched, rel=1e-2)
    assert second.buffers == 0


def test_stage_3_keeps_gradients_and_gathers_what_is_to_come() -> None:
    subject = job("zero3")
    vectors = (2 * LAYERS + 1) * H
    held = at(subject, phase="forward")
    assert held.gradients == pytest.approx(2 * WHOLE / RANKS, rel=0.01)
    assert held.buffers == pytest.approx(2 * (WHOLE - vectors) + 2 * vectors + 2 * H * H, rel=0.01)
    later = at(subject, done_gradients=V * H + BLOCK)
    assert held.buffers - later.buffers == 2 * (V * H + BLOCK)
    assert own(subject, "step").temporaries == pytest.approx((4 + 4) * WHOLE / RANKS, rel=0.01)


def test_offload_leaves_a_buffer_on_the_device_and_masters_moments_and_gradients_on_the_host() -> None:
    subject = job("zero2", offload="optimizer")
    assert own(subject, "step").total == 2 * V * H
    states = states_of(subject, recipe_of(subject))
    part = WHOLE / RANKS
    assert states.host == pytest.approx((4 + 8 + 4 + 2) * part + 2 * V * H, rel=1e-3)
    assert (states.optimizer, states.gradients) == (0, 0)


def test_pure_bf16_keeps_a_bf16_master() -> None:
    subject = job("zero2", precision="bf16-pure")
    states = states_of(subject, recipe_of(subject))
    assert states.optimizer == pytest.approx((2 + 2 + 2) * WHOLE / RANKS, rel=1e-3)
