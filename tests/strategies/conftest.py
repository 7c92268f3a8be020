"""Pools of ranks, started once per session and shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from planner.vocabulary import ZERO_STAGES
from strategies.backends.deepspeed.engine import why_impossible
from strategies.distributed.rank_pool import RankPool
from tests.strategies.training_bodies import Recipe

PoolOf = Callable[..., RankPool]
NewPool = Callable[..., RankPool]


@pytest.fixture(scope="session")
def ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Two ranks over gloo."""
    with new_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def one_rank(new_pool: NewPool) -> Iterator[RankPool]:
    """One rank by itself."""
    with new_pool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Three ranks over gloo: more than one peer, and shapes that divide by nothing."""
    with new_pool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Four ranks over gloo: two degrees of two."""
    with new_pool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def eight_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Eight ranks over gloo: three degrees of two."""
    with new_pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def deepspeed_ranks(request: pytest.FixtureRequest, new_pool: NewPool) -> Iterator[DeepSpeedRanks]:
    """Two ranks for DeepSpeed, whose engine leaves state behind in its process."""
    yield from _deepspeed(request, new_pool, 2)


@pytest.fixture(scope="session")
def deepspeed_three_ranks(request: pytest.FixtureRequest, new_pool: NewPool) -> Iterator[DeepSpeedRanks]:
    """Three ranks for DeepSpeed."""
    yield from _deepspeed(request, new_pool, 3)


class DeepSpeedRanks:
    """A pool that skips a test which trains in a precision that DeepSpeed has not got on this machine."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for recipe in (item for item in arguments if isinstance(item, Recipe)):
            configuration = recipe.plan().configuration
            if configuration.backend == "deepspeed" and configuration.precision != "fp32":
                problem: str | None = self._pool.run(why_impossible, configuration.precision)[0]
                if problem:
                    pytest.skip(problem)
        return self._pool.run(function, *arguments)


def _deepspeed(request: pytest.FixtureRequest, new_pool: NewPool, world_size: int) -> Iterator[DeepSpeedRanks]:
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    variables = {} if request.config.getoption("--cards") else {"DS_ACCELERATOR": "cpu"}
    with new_pool(world_size, variables=variables) as pool:
        yield DeepSpeedRanks(pool)


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> PoolOf:
    """The ranks, two or three, on which a strategy is tested."""

    def choose(strategy: str, world_size: int = 2) -> RankPool:
        library = "deepspeed_" if strategy in ZERO_STAGES else ""
        pool: RankPool = request.getfixturevalue(f"{library}{'three_' if world_size == 3 else ''}ranks")
        return pool

    return choose
