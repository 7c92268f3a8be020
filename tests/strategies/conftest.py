"""Pools of ranks, started once per session and shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from hardware_db.spawn import RankPool
from planner.vocabulary import ZERO_STAGES

PoolOf = Callable[..., RankPool]
NewPool = Callable[..., RankPool]


@pytest.fixture(scope="session")
def ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Two ranks over gloo."""
    with new_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Three ranks over gloo: more than one peer, and shapes that divide by nothing."""
    with new_pool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def deepspeed_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Two ranks for DeepSpeed, whose engine leaves state behind in its process."""
    yield from _deepspeed(new_pool, 2)


@pytest.fixture(scope="session")
def deepspeed_three_ranks(new_pool: NewPool) -> Iterator[RankPool]:
    """Three ranks for DeepSpeed."""
    yield from _deepspeed(new_pool, 3)


def _deepspeed(new_pool: NewPool, world_size: int) -> Iterator[RankPool]:
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    with new_pool(world_size, variables={"DS_ACCELERATOR": "cpu"}) as pool:
        yield pool


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> PoolOf:
    """The ranks, two or three, on which a strategy is tested."""

    def choose(strategy: str, world_size: int = 2) -> RankPool:
        library = "deepspeed_" if strategy in ZERO_STAGES else ""
        pool: RankPool = request.getfixturevalue(f"{library}{'three_' if world_size == 3 else ''}ranks")
        return pool

    return choose
