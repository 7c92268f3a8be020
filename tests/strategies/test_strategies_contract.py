"""What every strategy must do, whichever it is: a new strategy adds its name to SPREAD.

Ranks and accumulation only change the order in which numbers are added, so in fp32 losses and parameters agree with
plain single-process training to 1e-5; 16-bit precisions are compared at the size of their rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import training_bodies
from training_bodies import Recipe, Trained

from hardware_db.spawn import RankPool
from planner.vocabulary import STRATEGIES, ZERO_STAGES

NATIVE = ("native zero1", "native zero2", "native zero3")
SPREAD = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero1", "zero2", "zero3", *NATIVE)
PoolOf = Callable[[str], RankPool]


def test_every_strategy_of_the_vocabulary_is_tested() -> None:
    assert {*SPREAD, "single"} - {*NATIVE} == set(STRATEGIES)
    assert {name.removeprefix("native ") for name in NATIVE} == set(ZERO_STAGES)


def recipe_of(strategy: str) -> Recipe:
    # Two ranks cannot both shard and replicate; hsdp on four is tested below.
    backend, _, name = strategy.rpartition(" ")
    return Recipe(strategy=name, backend=backend, world_size=2, dp_replicate=2 if strategy == "hsdp" else 0)


def assert_same(trained: Trained, reference: Trained, tolerance: float) -> None:
    assert trained.losses == pytest.approx(reference.losses, rel=tolerance)
    compared = trained.parameters.keys() & reference.parameters.keys()
    assert len(compared) >= len(reference.parameters) - 1, "at most the tied head may go by its other name"
    for name in compared:
        difference = (trained.parameters[name] - reference.parameters[name]).norm()
        assert difference <= tolerance * reference.parameters[name].norm(), name


VARIANTS = {
    "plain": {},
    "accumulation": {"accumulation": 3},
    "accumulation reduced once": {"accumulation": 3, "sync_each": False},
    "clipping": {"clipping": 0.5, "accumulation": 3},
    "own groups and frozen weights": {"own_optimizer": True, "frozen": True},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("strategy", SPREAD)
def test_training_equals_one_process(strategy: str, variant: str, pool_of: PoolOf) -> None:
    recipe = replace(recipe_of(strategy), **VARIANTS[variant])
    for trained in pool_of(strategy).run(training_bodies.train, recipe):
        assert_same(trained, training_bodies.reference(recipe), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_equals_plain_torch(variant: str) -> None:
    recipe = replace(Recipe(), **VARIANTS[variant])
    assert_same(training_bodies.train(recipe), training_bodies.reference(recipe), 1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.005), ("bf16-pure", 0.02)])
@pytest.mark.parametrize("strategy", SPREAD)
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


def test_hsdp_shards_and_replicates_over_four_ranks() -> None:
    recipe = Recipe(strategy="hsdp", world_size=4, dp_replicate=2, steps=2)
    with RankPool(4) as pool:
        trained = pool.run(training_bodies.train, recipe)[3]
    assert_same(trained, training_bodies.reference(recipe), 1e-5)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("ddp", "adafactor"), *product(("ddp", "fsdp"), ("adamw", "adamw-fused", "adamw-forloop", "sgd"))],
)
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
    assert_same(ranks.run(training_bodies.train, recipe)[0], training_bodies.reference(recipe), 1e-5)


@pytest.mark.parametrize(("strategy", "offload"), [*product(NATIVE, ["optimizer"]), ("native zero3", "all")])
def test_our_zero_offloads_to_the_host(strategy: str, offload: str, ranks: RankPool) -> None:
    """On CPU ranks the states are on the host anyway."""
    recipe = replace(recipe_of(strategy), offload=offload, clipping=0.5)
    assert_same(ranks.run(training_bodies.train, recipe)[0], training_bodies.reference(recipe), 1e-5)


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


def test_rank_0_decides_the_weights(ranks: RankPool) -> None:
    for strategy in ("ddp", "fsdp", *NATIVE):
        first, second = ranks.run(training_bodies.first_weights_of_unlike_models, recipe_of(strategy))
        assert torch.equal(first, second)
