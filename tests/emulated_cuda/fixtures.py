"""Fixtures for tests of CUDA's branches: emulated cards, or a machine's own where its torch has CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
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


class CardPool(RankPool):
    """Ranks that start with a card each, in the group that the engine makes on GPUs. Skips where there are fewer."""

    def __init__(self, world_size: int, card_variables: Mapping[str, str], **options: Any) -> None:
        import torch

        if not card_variables and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
        super().__init__(world_size, **{"backend": "cpu:gloo,cuda:nccl", "timeout_seconds": 300.0, **options})
        self._card_variables = card_variables

    def _start(self) -> None:
        with variables_set(self._card_variables):  # an interpreter has the device from its start, or not at all
            super()._start()


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
