"""Fixtures for tests of CUDA's branches: emulated cards, or a machine's own where its torch has CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.emulated_cuda import Card, environment, why_not_here
from tests.preload import PRELOAD

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


_SERVER = forkserver.ForkServer()
"""Forks ranks with cards: a process that has the device from its start, beside multiprocessing's for other ranks."""
_PRELOAD = tuple(name for name in PRELOAD if not name.startswith("transformers"))


class CardPool(RankPool):
    """Ranks that start with a card each, in the group that the engine makes on GPUs. Skips where there are fewer.

    All of a session's are forked from one process with the session's cards, which imports torch once; those with
    variables of their own, which torch may read while it is imported, start by themselves.
    """

    def __init__(self, world_size: int, card_variables: Mapping[str, str], **options: Any) -> None:
        import torch

        if not card_variables and torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs, this machine has {torch.cuda.device_count()}")
        usual = {"backend": "cpu:gloo,cuda:nccl", "timeout_seconds": 300.0}
        super().__init__(world_size, **{**usual, "preload": () if options.get("variables") else _PRELOAD, **options})
        self._card_variables = card_variables

    def _start(self) -> None:
        own = {name: getattr(_SERVER, name) for name in ("connect_to_new_process", "set_forkserver_preload")}
        # An interpreter has the device from its start, or not at all.
        with variables_set(self._card_variables), mock.patch.multiple(forkserver, **own):
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
