"""Pools of ranks, started once per session and shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from hardware_db.spawn import RankPool
from planner.vocabulary import ZERO_STAGES

PoolOf = Callable[[str], RankPool]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two ranks over gloo."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks over gloo: more than one peer, and shapes that divide by nothing."""
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def deepspeed_ranks() -> Iterator[RankPool]:
    """Two ranks for DeepSpeed, whose engine leaves state behind in its process."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    with RankPool(2, variables={"DS_ACCELERATOR": "cpu"}) as pool:
        yield pool


@pytest.fixture
def pool_of(request: pytest.FixtureRequest) -> PoolOf:
    """The two ranks on which a strategy is tested."""

    def choose(strategy: str) -> RankPool:
        pool: RankPool = request.getfixturevalue("deepspeed_ranks" if strategy in ZERO_STAGES else "ranks")
        return pool

    return choose
