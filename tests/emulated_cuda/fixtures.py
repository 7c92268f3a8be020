"""Where tests get their cards from: the machine's own, or emulated ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from strategies.distributed.rank_pool import RankPool
from tests.emulated_cuda import Card, environment, why_not_here

CudaEnvironment = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def cuda_environment(tmp_path_factory: pytest.TempPathFactory) -> CudaEnvironment:
    """Variables that give a process `cards` cards of `memory_mib`: none where the machine has them, else skips."""

    def variables(cards: int = 2, *, memory_mib: int = 80 << 10) -> dict[str, str]:
        import torch

        if torch.version.cuda is not None:
            if torch.cuda.device_count() < cards:
                pytest.skip(f"needs {cards} cards, torch sees {torch.cuda.device_count()}")
            return {}
        if (reason := why_not_here()) is not None:
            pytest.skip(reason)
        return environment([Card(total_memory=memory_mib << 20)] * cards, tmp_path_factory.mktemp("cards"))

    return variables


class CardRanks(RankPool):
    """Ranks of whom each has a card, in the group that the engine makes on a GPU."""

    def __init__(self, world_size: int, variables: dict[str, str], **options: Any) -> None:
        super().__init__(world_size, backend="cpu:gloo,cuda:nccl", **options)
        self._before_python = variables

    def _start(self) -> None:
        with mock.patch.dict(os.environ, self._before_python):
            super()._start()
