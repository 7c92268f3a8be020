"""Fixtures for tests of CUDA's branches: emulated cards, or a machine's own where its torch has CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from strategies.distributed.rank_pool import RankPool
from tests.emulated_cuda import Card, environment, why_not_here

_MEMORY = 2 << 30
"""Bytes of each of the eight cards that a session's tests share."""


@pytest.fixture(scope="session")
def cuda_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Variables with which a process has cards; none where the machine has cards of its own."""
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        return {}
    reason = why_not_here()
    if reason is not None:
        pytest.skip(reason)
    return environment([Card(total_memory=_MEMORY)] * 8, tmp_path_factory.mktemp("emulated-cuda"))


@pytest.fixture
def emulated(cuda_environment: Mapping[str, str]) -> None:
    """Skips on a real card, where a race may go well and a late copy is rarely late."""
    if not cuda_environment:
        pytest.skip("this machine has real cards, which do not report races")


@pytest.fixture(scope="session")
def card(cuda_environment: Mapping[str, str]) -> Iterator[CardPool]:
    """One process with cards."""
    with CardPool(1, cuda_environment) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_cards(cuda_environment: Mapping[str, str]) -> Iterator[CardPool]:
    """Two ranks with a card each, over nccl."""
    with CardPool(2, cuda_environment) as pool:
        yield pool


class CardPool:
    """A `RankPool` over nccl whose ranks are started with cards. Skips where the machine has fewer."""

    def __init__(self, world_size: int, variables: Mapping[str, str]) -> None:
        import torch

        if not variables and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
        self._variables = variables
        self._pool = RankPool(world_size, backend="nccl", timeout_seconds=300.0)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on every rank, as `RankPool.run` does."""
        with variables_set(self._variables):  # an interpreter has the device from its start, or not at all
            return self._pool.run(function, *arguments)

    def __enter__(self) -> CardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
