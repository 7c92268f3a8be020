"""Pools of ranks, started once per session and shared by the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.files import DATABASE_NAME, HOME
from hardware_db.fingerprint import fingerprint
from hardware_db.microbench.grid import CPU, Rate, as_measurement, quick_points
from hardware_db.probe import probe
from hardware_db.store import open_store
from planner.vocabulary import ZERO_STAGES
from strategies.backends.deepspeed.engine import why_impossible
from tests.strategies.training_bodies import Recipe

PoolOf = Callable[..., RankPool]
NewPool = Callable[..., RankPool]
RATES = {
    "matmul": (4e10, "FLOP/s"),
    "memory": (1e10, "bytes/s"),
    "cpu_adamw": (1.5e8, "parameters/s"),
    "all_reduce_latency": (4e-4, "s"),
    "all_reduce": (1e9, "bytes/s"),
    "all_gather": (5e8, "bytes/s"),
    "reduce_scatter": (2.5e8, "bytes/s"),
    "clone": (1.7e9, "bytes/s"),
}
"""Of a machine with two cores: what ranks there measure before a first plan, which takes each of them a second."""


@pytest.fixture(scope="session")
def database_with_rates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which this machine's ranks find rates, and need not measure them."""
    path, machine = tmp_path_factory.mktemp("rates") / DATABASE_NAME, fingerprint(probe())
    points = [point for ranks in (1, 2, 3, 4) for point in quick_points(CPU, ranks)]
    rates = (Rate(point=point, value=RATES[point.operation][0], unit=RATES[point.operation][1]) for point in points)
    with open_store(path) as store:
        store.add(*(as_measurement(rate, machine, "run") for rate in rates))
    return path


@pytest.fixture(autouse=True)
def dsplan_home(
    _nothing_leaks: None, tmp_path: Path, database_with_rates: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A user data directory beside the test's own, on a machine that was measured.

    `launch/test_examples.py` shows a run on one that was not.
    """
    home = tmp_path.with_name(f"{tmp_path.name}-home")
    home.mkdir()
    shutil.copy(database_with_rates, home / DATABASE_NAME)
    monkeypatch.setenv(HOME, str(home))
    return home


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
