"""The contract of every strategy, whichever it is: a new strategy adds its name to SPREAD.

Losses and every parameter after ten steps are those of plain torch in one process, on two and on three ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.vocabulary import STRATEGIES, ZERO_STAGES
from tests.strategies import contract_bodies, training_bodies
from tests.strategies.training_bodies import Recipe, Trained

NATIVE = ("native zero1", "native zero2", "native zero3")
SPREAD = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero1", "zero2", "zero3", *NATIVE)
WORLDS = (2, 3)
PoolOf = Callable[..., RankPool]
FP32 = 1e-5
"""Relative: the order of a sum over ranks and micro-batches is all that differs, 2^-24 each, over ten steps."""
BF16_LOSS, BF16_MOVE = 2**-9, 0.1
"""What may differ in bf16 from one process with the same arithmetic (bf16 weights and gradients, fp32 masters).

Each rank and micro-batch rounds its gradient by 2^-9 before they are summed, and losses see one rounding of what they
are computed from. AdamW passes that on to the update as it is, but where gradients cancel an element may go the other
way for a step: 2 of the 10 learning rates that elements move, which in a parameter of 16 elements is 0.05 of the norm
of its move. Two such elements are allowed.
"""


def test_every_strategy_of_the_vocabulary_is_tested() -> None:
    assert {*SPREAD, "single"} - {*NATIVE} == set(STRATEGIES)
    assert {name.removeprefix("native ") for name in NATIVE} == set(ZERO_STAGES)


def recipe_of(strategy: str, world_size: int = 2) -> Recipe:
    # Two ranks cannot both shard and replicate; hsdp on four is tested below.
    backend, _, name = strategy.rpartition(" ")
    replicas = world_size if strategy == "hsdp" else 0
    return Recipe(strategy=name, backend=backend, world_size=world_size, dp_replicate=replicas)


def ten_steps(strategy: str, world_size: int, **how: Any) -> Recipe:
    # Eighteen samples can be shared out by two and by three ranks in three micro-batches.
    return replace(recipe_of(strategy, world_size), steps=10, global_batch=18, **how)


def assert_same(trained: Trained, reference: Trained, tolerance: float) -> None:
    assert trained.losses == pytest.approx(reference.losses, rel=tolerance)
    assert trained.parameters.keys() == reference.parameters.keys()
    for name, expected in reference.parameters.items():
        assert (trained.parameters[name] - expected).norm() <= tolerance * expected.norm(), name


def assert_same_in_bf16(trained: Trained, recipe: Recipe) -> None:
    start, reference = contract_bodies.start(), contract_bodies.reference_in_bf16(recipe)
    assert trained.losses == pytest.approx(reference.losses, rel=BF16_LOSS)
    assert trained.parameters.keys() == reference.parameters.keys()
    for name, learned in trained.parameters.items():
        expected = reference.parameters[name]
        # Whoever computes with bf16 weights shows these; the masters are beside them.
        shown = expected.bfloat16().float() if torch.equal(learned, learned.bfloat16().float()) else expected
        assert (learned - shown).norm() <= BF16_MOVE * (expected - start[name]).norm(), name


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 3},
    "accumulation reduced once": {"accumulation": 3, "sync_each": False},
    "clipping": {"clipping": 0.5, "accumulation": 3},
    "own groups and frozen weights": {"own_optimizer": True, "frozen": True},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
}
EVERYWHERE = ("plain", "clipping")  # the latter accumulates too
ENGINES = ("ddp", "fsdp", "zero2", "native zero2", "native zero3")
"""One strategy of each implementation: the suite runs what is the same in all of it on these."""
SHARDERS = ("fsdp", "native zero3")
"""Of them those that shard weights: layouts, and ranks that divide nothing, are most to them."""
LAYOUTS = {*VARIANTS} - {*EVERYWHERE, "accumulation"}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(
    every=4,
    suite=lambda strategy, variant: variant == "clipping" or (strategy in SHARDERS and variant in LAYOUTS),
)
def test_training_equals_one_process(strategy: str, variant: str, pool_of: PoolOf) -> None:
    recipe = ten_steps(strategy, 2, **VARIANTS[variant])
    for trained in pool_of(strategy).run(training_bodies.train, recipe):
        assert_same(trained, training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize("variant", EVERYWHERE)
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=2, suite=lambda strategy, variant: variant == "clipping" and strategy in (*SHARDERS, "hsdp"))
def test_training_on_three_ranks_equals_one_process(strategy: str, variant: str, pool_of: PoolOf) -> None:
    recipe = ten_steps(strategy, 3, **VARIANTS[variant])
    for trained in pool_of(strategy, 3).run(training_bodies.train, recipe):
        assert_same(trained, training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize("variant", EVERYWHERE)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(
    every=2,
    suite=lambda strategy, world_size, variant: strategy in ENGINES and (world_size, variant) == (2, "clipping"),
)
def test_bf16_training_equals_one_process(strategy: str, world_size: int, variant: str, pool_of: PoolOf) -> None:
    recipe = ten_steps(strategy, world_size, precision="bf16", **VARIANTS[variant])
    for trained in pool_of(strategy, world_size).run(training_bodies.train, recipe):
        assert_same_in_bf16(trained, recipe)


def test_the_bf16_tolerance_is_less_than_what_lacking_masters_cost() -> None:
    recipe = ten_steps("native zero2", 2, precision="bf16")
    without = training_bodies.train(Recipe(precision="bf16-pure", steps=10, global_batch=18))
    with pytest.raises(AssertionError, match=r"embedding\.weight"):
        assert_same_in_bf16(replace(without, losses=contract_bodies.reference_in_bf16(recipe).losses), recipe)
    with pytest.raises(AssertionError, match="comparison failed"):
        assert_same_in_bf16(without, recipe)


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_equals_plain_torch(variant: str) -> None:
    recipe = replace(Recipe(steps=10, global_batch=18), **VARIANTS[variant])
    assert_same(training_bodies.train(recipe), training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 0.005), ("bf16-pure", 0.02)])
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=4, suite=lambda strategy: strategy in ENGINES)
def test_sixteen_bits_learn_the_same_within_rounding(
    strategy: str, precision: str, tolerance: float, pool_of: PoolOf
) -> None:
    recipe = replace(recipe_of(strategy), precision=precision, accumulation=3)
    trained = pool_of(strategy).run(training_bodies.train, recipe)[0]
    reference = training_bodies.reference(recipe)
    assert trained.losses == pytest.approx(reference.losses, rel=tolerance)
    assert trained.losses != reference.losses, "nothing was computed in 16 bits"
    assert trained.losses[-1] < trained.losses[0] - 1


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=2, suite=lambda strategy: strategy in ENGINES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(strategy: str, pool_of: PoolOf) -> None:
    """The scheduler does not move either, and training resumes from the weights it had."""
    recipe = ten_steps(strategy, 2, precision="fp16", accumulation=3)
    of_ranks = pool_of(strategy).run(contract_bodies.overflow_on_rank_1, recipe)
    expected = contract_bodies.reference_without_the_first_step(recipe)
    for seen in of_ranks:
        assert seen.stayed
        assert seen.skipped == [0] + [1] * 10
        assert seen.scales[:3] == [256, 128, 128]
        assert max(seen.scales[3:]) > 128, "it grows again after steps without overflow"
        assert seen.scales == of_ranks[0].scales
        assert seen.rates[:3] == pytest.approx([2e-3, 2e-3, 1.8e-3])
        assert seen.losses[1:] == pytest.approx(expected[1:], rel=0.005)
        assert all(torch.equal(seen.parameters[name], value) for name, value in of_ranks[0].parameters.items())


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=2, suite=lambda strategy: strategy in ENGINES)
def test_a_resumed_run_continues_the_same_losses(strategy: str, pool_of: PoolOf, tmp_path: Path) -> None:
    recipe = replace(recipe_of(strategy), accumulation=3)
    for unbroken, resumed, client_state in pool_of(strategy).run(
        training_bodies.save_and_resume, recipe, str(tmp_path)
    ):
        assert resumed == pytest.approx(unbroken, rel=1e-6)
        assert client_state == {"step": 3, "note": "after three"}
    assert (tmp_path / "latest").read_text().strip() == "step-00000003"


def test_single_resumes(tmp_path: Path) -> None:
    unbroken, resumed, client_state = training_bodies.save_and_resume(Recipe(), str(tmp_path))
    assert resumed == pytest.approx(unbroken, rel=1e-6)
    assert client_state["step"] == 3


def test_hsdp_shards_and_replicates_over_four_ranks(new_pool: Callable[..., RankPool]) -> None:
    recipe = Recipe(strategy="hsdp", world_size=4, dp_replicate=2, steps=2)
    with new_pool(4) as pool:
        trained = pool.run(training_bodies.train, recipe)[3]
    assert_same(trained, training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("ddp", "adafactor"), *product(("ddp", "fsdp"), ("adamw", "adamw-fused", "adamw-forloop", "sgd"))],
)
@pytest.mark.sweep(suite=lambda strategy, optimizer: (strategy, optimizer) != ("fsdp", "adamw-forloop"))
def test_the_plan_names_the_optimizer(strategy: str, optimizer: str, pool_of: PoolOf) -> None:
    kind, losses = pool_of(strategy).run(
        training_bodies.train_with_planned_optimizer, replace(recipe_of(strategy), optimizer=optimizer)
    )[0]
    alone = training_bodies.train_with_planned_optimizer(Recipe(optimizer=optimizer))
    assert kind == alone[0] == {"sgd": "SGD", "adafactor": "Adafactor"}.get(optimizer, "AdamW")
    assert losses == pytest.approx(alone[1], rel=1e-4)
    assert losses[-1] < losses[0]


def test_fsdp_offloads_to_the_host(ranks: RankPool) -> None:
    """On CPU ranks the host is where the shards are anyway; the path through the policy is the same."""
    recipe = replace(recipe_of("fsdp"), offload="all", clipping=0.5)
    assert_same(ranks.run(training_bodies.train, recipe)[0], training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [*product((*NATIVE, *ZERO_STAGES), ["optimizer"]), ("native zero3", "all"), ("zero3", "all")],
)
@pytest.mark.sweep(every=3)
def test_zero_offloads_to_the_host(strategy: str, offload: str, pool_of: PoolOf) -> None:
    """On CPU ranks the states are on the host anyway; test_offload.py keeps ours apart."""
    recipe = replace(recipe_of(strategy), offload=offload, clipping=0.5, accumulation=3)
    assert_same(pool_of(strategy).run(training_bodies.train, recipe)[0], training_bodies.reference(recipe), FP32)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", *NATIVE])
def test_sharded_states_take_half_the_memory_of_replicated_ones(strategy: str, pool_of: PoolOf) -> None:
    whole = pool_of("ddp").run(training_bodies.state_bytes, recipe_of("ddp"))[0]
    shards = pool_of(strategy).run(training_bodies.state_bytes, recipe_of(strategy))
    # Rows that do not divide by two are padded, and DeepSpeed aligns its flat buffers.
    assert sum(shards) == pytest.approx(whole, rel=0.05)
    assert max(shards) < 0.55 * whole


def test_fsdp_keeps_whole_gradients_only_where_the_plan_counts_on_them(ranks: RankPool) -> None:
    each = replace(recipe_of("fsdp"), accumulation=3)
    _, reduced, sizes = ranks.run(training_bodies.tracked_step, each)[0]
    _, kept, _ = ranks.run(training_bodies.tracked_step, replace(each, sync_each=False))[0]
    whole = sum(4 * math.prod(shape) for shape in sizes)
    assert kept - reduced > 0.4 * whole, "whole gradients instead of half of them"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *NATIVE])
def test_an_engine_is_freed_with_its_model(strategy: str, ranks: RankPool) -> None:
    """Gradients that our ZeRO reduces arrive as long as a script holds the model alone; then nothing is left."""
    is_kept, is_left = ranks.run(training_bodies.what_is_left_of_engines, recipe_of(strategy))[0]
    assert is_kept == (strategy in NATIVE)
    assert not is_left


def test_rank_0_decides_the_weights(ranks: RankPool) -> None:
    for strategy in ("ddp", "fsdp", *NATIVE):
        first, second = ranks.run(training_bodies.first_weights_of_unlike_models, recipe_of(strategy))
        assert torch.equal(first, second)
