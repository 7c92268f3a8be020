"""Models and training loops that strategies stumble over: each trains as in plain torch, rank by rank."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies import awkward_bodies
from tests.strategies.awkward_models import CASES

NATIVE = ("native zero1", "native zero2", "native zero3")
SPREAD = ("ddp", "fsdp", *NATIVE)
TRAINED = [
    *product(NATIVE, CASES),
    *(("ddp", name) for name, case in CASES.items() if case.under_ddp),
]


def assert_equal(learned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert learned.keys() == expected.keys()
    for name, value in expected.items():
        assert (learned[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize(("strategy", "name"), TRAINED)
@pytest.mark.sweep(every=4, suite=lambda strategy: strategy in ("native zero3", "ddp"))
def test_it_trains_as_in_plain_torch(strategy: str, name: str, ranks: RankPool) -> None:
    losses, parameters = awkward_bodies.reference(name)
    for rank, trained in enumerate(ranks.run(awkward_bodies.train, strategy, name)):
        assert trained.losses == pytest.approx(losses[rank], rel=1e-5)
        assert_equal(trained.parameters, parameters)


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> dict[str, torch.Tensor]:
    """The parameters of an undisturbed run."""
    parameters: dict[str, torch.Tensor] = ranks.run(awkward_bodies.undisturbed, "ddp")[0]
    return parameters


BETWEEN = [
    (strategy, how)
    for strategy, how in product(SPREAD, awkward_bodies.DISTURBANCES)
    if (strategy, how) != ("fsdp", "a copy of the model")  # FSDP2's modules cannot be copied
]


@pytest.mark.parametrize(("strategy", "how"), BETWEEN)
@pytest.mark.sweep(every=2, suite=lambda strategy: strategy in ("native zero3", "fsdp"))
def test_between_steps(strategy: str, how: str, ranks: RankPool, plain: dict[str, torch.Tensor]) -> None:
    for learned in ranks.run(awkward_bodies.disturbed, strategy, how):
        assert_equal(learned, plain)


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=2)
def test_evaluation_between_micro_batches(strategy: str, ranks: RankPool, plain: dict[str, torch.Tensor]) -> None:
    for learned in ranks.run(awkward_bodies.evaluate_between_micro_batches, strategy):
        assert_equal(learned, plain)


@pytest.mark.parametrize("strategy", SPREAD)
def test_several_backward_calls_before_a_step(strategy: str, ranks: RankPool, plain: dict[str, torch.Tensor]) -> None:
    for learned in ranks.run(awkward_bodies.several_backward_calls, strategy):
        assert_equal(learned, plain)


@pytest.mark.parametrize("strategy", NATIVE)
def test_parameters_frozen_and_thawed_on_the_way(strategy: str, ranks: RankPool) -> None:
    """DDP and FSDP2 wait for gradients of what required one when they were set up."""
    for learned in ranks.run(awkward_bodies.freeze_and_thaw, strategy):
        assert_equal(learned, awkward_bodies.reference_freeze_and_thaw())


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=2)
def test_one_backward_pass_through_two_engines(strategy: str, ranks: RankPool) -> None:
    for learned in ranks.run(awkward_bodies.two_engines, strategy):
        assert_equal(learned, awkward_bodies.reference_two_engines())
