"""Resident states against the ZeRO arithmetic (FEATURES E1), to the byte."""

from __future__ import annotations

from typing import Any

import pytest

import dsplan
from planner import vocabulary as words
from planner.errors import ContradictoryRequest
from planner.search.estimate import estimate
from planner.search.evaluate import Candidate, families_of
from planner.search.space import enumerate_candidates
from planner.types.plan import Configuration, Plan
from tests.planner.search.questions import question

GPUS = 8
PSI = 6_658_473_984  # OPT-6.7b as transformers builds it
K = 12  # fp32 master copy and both moments of Adam


def plan(strategy: str, precision: str = "bf16", **options: object) -> Plan:
    backend = "deepspeed" if strategy.startswith("zero") else "torch"
    sharded = strategy != "ddp"
    configuration = Configuration(
        strategy=strategy,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        dp_replicate=1 if sharded else GPUS,
        dp_shard=GPUS if sharded else 1,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        global_batch_size=GPUS,
        sequence_length=2048,
        precision=precision,  # type: ignore[arg-type]
        optimizer="adamw",
        **options,  # type: ignore[arg-type]
    )
    return estimate(question("opt-6.7b", "a100-80gb", GPUS, global_batch=GPUS, precision=precision), configuration)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("zero1", (2 * PSI, 2 * PSI, K * PSI / GPUS)),
        ("zero2", (2 * PSI, 2 * PSI / GPUS, K * PSI / GPUS)),
        ("zero3", (2 * PSI / GPUS, 2 * PSI / GPUS, K * PSI / GPUS)),
        ("fsdp", (4 * PSI / GPUS, 4 * PSI / GPUS, 8 * PSI / GPUS)),
        ("ddp", (4 * PSI, 4 * PSI, 8 * PSI)),
    ],
)
def test_states_follow_the_zero_arithmetic(strategy: str, expected: tuple[float, float, float]) -> None:
    states = plan(strategy).memory.states
    states_bytes = (states["parameters_bytes"], states["gradients_bytes"], states["optimizer_bytes"])
    assert states_bytes == tuple(round(value) for value in expected)


@pytest.mark.parametrize(("precision", "total"), [("fp32", 16), ("bf16", 16), ("bf16-pure", 8)])
def test_bytes_per_parameter_of_a_replica(precision: str, total: int) -> None:
    assert sum(plan("ddp", precision).memory.states.values()) == total * PSI


def test_offload_moves_optimizer_states_to_the_host() -> None:
    here, moved = plan("zero2"), plan("zero2", offload="optimizer")
    assert moved.memory.states["optimizer_bytes"] == 0
    # fp32 master, both moments and an fp32 gradient of the whole model live on the node.
    assert moved.memory.host_bytes_per_node - here.memory.host_bytes_per_node >= 16 * PSI


def test_categories_add_up_to_the_peak_and_the_peak_is_the_largest_phase() -> None:
    for strategy in ("ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3"):
        memory = plan(strategy).memory
        categories = (
            memory.parameters_bytes
            + memory.gradients_bytes
            + memory.optimizer_bytes
            + memory.activations_bytes
            + memory.buffers_bytes
            + memory.temporaries_bytes
        )
        assert categories == memory.peak_allocated_bytes
        assert memory.peak_allocated_bytes == pytest.approx(max(memory.phases.values()), abs=4)
        assert memory.peak_allocated_bytes < memory.peak_reserved_bytes < memory.device_used_bytes
        assert memory.device_used_bytes < memory.device_used_upper_bytes


def test_unsynchronised_accumulation_costs_four_bytes_per_parameter() -> None:
    phases = {}
    for each in (True, False):
        configuration = Configuration(
            strategy="fsdp",
            backend="torch",
            dp_shard=GPUS,
            micro_batch_size=1,
            gradient_accumulation_steps=2,
            global_batch_size=2 * GPUS,
            sequence_length=2048,
            precision="bf16",
            optimizer="adamw",
            sync_each_micro_batch=each,
        )
        request = question("opt-6.7b", "a100-80gb", GPUS, global_batch=2 * GPUS)
        phases[each] = estimate(request, configuration).memory.phases
    more = {name: phases[False][name] - phases[True][name] for name in ("forward", "loss", "backward")}
    whole = 4 * PSI - 4 * PSI / GPUS
    # In forward and loss both peaks are at the same moment, so that nothing but the gradients is between them.
    assert more["forward"] == pytest.approx(whole, rel=1e-5)
    assert more["loss"] == pytest.approx(whole, rel=1e-5)
    # Backward's are not: only the synchronised one has a reduction beside it, of a block at most.
    assert whole - 4 * request.counts.largest_block <= more["backward"] <= whole


def test_one_screen_says_one_thing_of_experts_that_do_not_spread() -> None:
    few = dsplan.estimate(model="mixtral-8x7b", gpus=64, gpu="H100", strategy="fsdp", checkpointing="full")
    states, memory = few.memory.states, few.memory
    assert states["parameters_bytes"] == pytest.approx(memory.parameters_bytes, rel=0.01)
    assert states["optimizer_bytes"] == pytest.approx(memory.optimizer_bytes, rel=0.01)
    assert any("8 over 64 ranks" in note and "--ep" in note for note in few.notes)
    enough = dsplan.estimate(model="mixtral-8x7b", gpus=8, gpu="H100", strategy="fsdp", checkpointing="full")
    assert not any("--ep" in note for note in enough.notes)


@pytest.mark.parametrize(("attention", "saves"), [("eager", False), ("sdpa", True)])
def test_selective_checkpointing_that_saves_nothing_is_said_and_not_proposed(
    attention: words.Attention, saves: bool
) -> None:
    flags = {"model": "gemma-3-4b", "gpus": 8, "gpu": "H200", "attention": attention, "precision": "fp32"}
    none, selective = (
        dsplan.estimate(**flags, strategy="fsdp", checkpointing=level) for level in ("none", "selective")
    )
    assert (selective.memory.peak_allocated_bytes < none.memory.peak_allocated_bytes) == saves
    assert any("selective checkpointing keeps more" in note for note in selective.notes) != saves
    request = question("gemma-3-4b", "h200", 8, attention=attention, precision="fp32")
    candidates = [Candidate(request, layout) for layout in enumerate_candidates(request)]
    offered = {member.layout.checkpointing for family in families_of(candidates) for member in family.members}
    assert ("selective" in offered) == saves


@pytest.mark.parametrize(
    ("strategy", "whole", "shared"),
    [("zero1", 4, K), ("zero2", 2, 2 + K), ("zero3", 0, 2 + K), ("fsdp", 0, 16)],
)
def test_copies_of_shards_have_the_states_of_a_copy(strategy: str, whole: int, shared: int) -> None:
    """ZeRO's arithmetic over the ranks of one copy (MiCS, arXiv 2205.00119), however many copies there are; our own
    stage 3 all-gathers from the masters and keeps no other weights."""
    backend = "native" if strategy.startswith("zero") else "torch"
    options: dict[str, Any] = {"model": "opt-6.7b", "gpu": "a100-80gb", "strategy": strategy, "backend": backend}
    for gpus, shard in ((8, None), (64, 8), (64, 16), (64, None)):
        states = dsplan.estimate(**options, gpus=gpus, shard=shard).memory.states
        expected = whole * PSI + shared * PSI / (shard or gpus)
        assert sum(states.values()) == pytest.approx(expected, rel=1e-3), (gpus, shard)


def test_hpz_keeps_a_second_copy_of_the_weights() -> None:
    """2 bytes of every parameter over the ranks of a node (ZeRO++, arXiv 2306.10209, section 3.2)."""
    options: dict[str, Any] = {"model": "opt-6.7b", "gpu": "a100-80gb", "gpus": 64, "strategy": "zero3"}
    plain, second = dsplan.estimate(**options), dsplan.estimate(**options, hpz=8)
    more = second.memory.phases["backward"] - plain.memory.phases["backward"]
    assert more == pytest.approx(2 * PSI / 8, rel=0.01)
    assert second.time.communication_seconds < plain.time.communication_seconds


def test_recommend_keeps_to_the_ranks_that_are_to_share_states() -> None:
    options: dict[str, Any] = {"model": "opt-1.3b", "gpus": 16, "gpu": "a100-80gb", "seq_len": 512, "global_batch": 64}
    free, eight = dsplan.recommend(**options), dsplan.recommend(**options, shard=8)
    assert free.plans[0].configuration.state_shards != 8
    assert len(eight.plans) > 3
    for chosen in eight.plans:
        assert chosen.configuration.state_shards == 8
        same = dsplan.estimate(**options, **_as_asked(chosen), shard=8)
        assert same.configuration == chosen.configuration
        assert same.memory == chosen.memory
    copies = {item.configuration.strategy for item in eight.plans if item.configuration.dp_replicate > 1}
    assert "hsdp" in copies
    assert "fsdp" not in copies, "its copies are hsdp's"


def _as_asked(chosen: Plan) -> dict[str, Any]:
    of = chosen.configuration
    return {
        "strategy": of.strategy,
        "backend": of.backend,
        "micro_batch": of.micro_batch_size,
        "checkpointing": of.activation_checkpointing,
        "offload": of.offload,
        **{name: getattr(of, name) for name in ("tp", "pp", "cp", "ep", "pp_schedule", "virtual_stages")},
    }


@pytest.mark.parametrize(
    ("shard", "why"),
    [(3, "--shard 3 does not divide 16 GPUs; use 2"), (32, "use 16"), (1, "--shard 1 shares no states")],
)
def test_ranks_that_cannot_share_states(shard: int, why: str) -> None:
    with pytest.raises(ContradictoryRequest, match=why):
        dsplan.recommend(model="opt-1.3b", gpus=16, gpu="a100-80gb", global_batch=64, shard=shard)


def test_the_search_weighs_copies_of_the_fewest_nodes_that_hold_the_states() -> None:
    def spreads(model: str, strategy: str, **options: object) -> set[tuple[int, int]]:
        request = question(model, "h100", 256, strategies=(strategy,), allow_unrunnable=True, **options)
        whole = (layout for layout in enumerate_candidates(request) if not layout.splits_model)
        return {(layout.dp_replicate, layout.dp_shard) for layout in whole}

    assert spreads("llama-2-7b", "hsdp") == {(32, 8)}
    assert spreads("llama-3-70b", "hsdp") == {(32, 8), (16, 16)}, "1.1 TB of states in 80 GB each"
    assert spreads("llama-2-7b", "zero1", code="megatron") == {(1, 256), (32, 8)}
    assert spreads("llama-2-7b", "zero2", zero_backend="native") == {(1, 256), (32, 8)}
    assert spreads("llama-2-7b", "zero2") == {(1, 256)}, "DeepSpeed shards over all ranks"


def test_the_search_makes_no_copies_over_which_experts_do_not_divide() -> None:
    """GPT-OSS 120B on 8 nodes: copies of one node with tp 4 and ep 16 would leave a rank without whole experts."""
    options = {"code": "megatron", "allow_unrunnable": True, "seq_len": 4096, "global_batch": 1280}
    request = question("gpt-oss-120b", "h100", 64, **options)
    layouts = tuple(enumerate_candidates(request))
    assert any(layout.ep == 16 for layout in layouts)
    assert any(layout.dp_replicate > 1 and layout.strategy == "zero1" for layout in layouts)
    assert all(layout.dp_shard * layout.cp * layout.tp % layout.ep == 0 for layout in layouts)
