"""Unlike shares of a global batch: the losses and weights of an even run, in the time of the ideal split."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.types.shares import split_by_rate, write_sizes
from tests.strategies import uneven_bodies
from tests.strategies.backends.test_contract import FP32, assert_same
from tests.strategies.training_bodies import Recipe
from tests.strategies.uneven_bodies import Run

RANKS, BATCH, ACCUMULATION = 4, 56, 2
RATES = ((3, 1.0), (1, 0.5))
STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "native zero1", "native zero2", "native zero3")


def runs(strategy: str, accumulation: int = ACCUMULATION, **how: Any) -> tuple[Run, Run]:
    """The same steps with as many samples on every rank, and with half as many on the last."""
    backend, _, name = strategy.rpartition(" ")
    recipe = Recipe(
        strategy=name,
        backend=backend,
        world_size=RANKS,
        dp_replicate=2 if name == "hsdp" else 0,
        accumulation=accumulation,
        global_batch=BATCH,
        sync_each=how.pop("sync_each", True),
        precision=how.pop("precision", "fp32"),
    )
    plan = recipe.plan()
    sizes = split_by_rate(BATCH // accumulation, RATES)
    assert sizes is not None
    most = max(size for _, size in chain(*sizes))
    uneven = replace(plan.configuration, micro_batches=write_sizes(chain(*sizes)), micro_batch_size=most)
    return Run(plan=plan, **how), Run(plan=replace(plan, configuration=uneven), **how)


def test_the_slow_rank_has_half() -> None:
    chosen = runs("ddp")[1].plan.configuration
    assert chosen.micro_batches == "3x8,1x4"
    assert [chosen.micro_batch_of(rank) for rank in range(RANKS)] == [8, 8, 8, 4]
    assert [chosen.samples_before(rank) for rank in range(RANKS)] == [0, 8, 16, 24]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sweep(suite=lambda strategy: strategy in ("ddp", "native zero3"))
def test_losses_and_weights_are_those_of_an_even_run(strategy: str, four_ranks: RankPool) -> None:
    even, uneven = runs(strategy, clipping=0.5)
    expected, trained = (four_ranks.run(uneven_bodies.train, run)[RANKS - 1] for run in (even, uneven))
    assert_same(trained, expected, FP32)
    assert trained.losses != [trained.losses[0]] * 5


def test_the_weights_are_what_makes_them_equal(four_ranks: RankPool) -> None:
    """Without them the last rank's samples would count twice."""
    even, uneven = runs("ddp")
    expected = four_ranks.run(uneven_bodies.train, even)[0]
    unweighted = four_ranks.run(uneven_bodies.train_unweighted, uneven)[0]
    with pytest.raises(AssertionError):
        assert_same(unweighted, expected, FP32)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "native zero2"])
def test_gradients_reduced_once_count_the_same(strategy: str, four_ranks: RankPool) -> None:
    even, uneven = runs(strategy, sync_each=False)
    expected, trained = (four_ranks.run(uneven_bodies.train, run)[0] for run in (even, uneven))
    assert_same(trained, expected, FP32)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "native zero3"])
def test_the_three_calls_train_the_same(strategy: str, four_ranks: RankPool) -> None:
    even, uneven = runs(strategy)
    expected = four_ranks.run(uneven_bodies.train, even)[0]
    by_calls = four_ranks.run(uneven_bodies.train_by_calls, uneven)
    assert [set(sizes) for sizes, _ in by_calls] == [{8}, {8}, {8}, {4}]
    losses = [sum(part) / (RANKS * ACCUMULATION) for part in zip(*(run.losses for _, run in by_calls), strict=True)]
    steps = [sum(losses[first : first + ACCUMULATION]) for first in range(0, len(losses), ACCUMULATION)]
    assert_same(replace(by_calls[0][1], losses=steps), expected, FP32)


@pytest.mark.slow
def test_a_run_goes_on_with_other_shares(four_ranks: RankPool, tmp_path: Path) -> None:
    even, uneven = runs("native zero2")
    expected = four_ranks.run(uneven_bodies.train, even)[0]
    losses = four_ranks.run(uneven_bodies.resume_evenly, uneven, even, str(tmp_path))[0]
    assert losses == pytest.approx(expected.losses, rel=FP32)


def test_a_micro_batch_of_another_size_is_refused(four_ranks: RankPool) -> None:
    _, uneven = runs("ddp")
    messages = four_ranks.run(uneven_bodies.refused, uneven, 8)
    assert messages[:3] == [""] * 3
    assert messages[3].startswith("CannotRun: the plan gives rank 3 micro-batches of 4 samples (3x8,1x4) and the")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "native zero2", "native zero3", "fsdp"])
def test_a_step_takes_as_long_as_the_ideal_split(strategy: str, four_ranks: RankPool) -> None:
    """Rates of 1, 1, 1 and 0.5: the ideal is all samples over 3.5, and an even split waits for a quarter at half speed.

    The ideal is a run whose ranks all take that long, so that messages cost it as much. The shortest step counts: what
    else runs on the machine only adds to it.
    """
    each = 0.1
    slowed, ideally = (each, each, each, 2 * each), (each * RANKS / 3.5,) * RANKS
    even, uneven = runs(strategy, accumulation=1, seconds_per_sample=slowed, steps=6)
    ideal = replace(even, seconds_per_sample=ideally)
    best, took, waited = (
        min(four_ranks.run(uneven_bodies.seconds_of_steps, run)[0][1:]) for run in (ideal, uneven, even)
    )
    computed = BATCH * each / 3.5
    print(
        f"{strategy}: ideal {best:.3f} s ({computed:.3f} s without messages), uneven {took:.3f} s"
        f" ({took / best:.3f}; {took / computed:.3f}), even {waited:.3f} s ({waited / best:.3f};"
        f" {waited / (BATCH / RANKS * each):.3f} of four fast ranks without messages)"
    )
    assert took <= 1.05 * best
    assert waited >= 1.5 * best
