"""Which samples a rank gets: together the ranks see every sample once, in the same global batches whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset
from training_bodies import Recipe

from strategies.data import LoaderSettings, ShardedLoader
from strategies.environment import Environment


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def handed_out(loader: ShardedLoader, most: int | None = None) -> list[list[int]]:
    """Up to `most` micro-batches that an engine trains on."""
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        loader.trained()
        if len(batches) == most:
            break
    return batches


def global_batches(samples: int, world: int, accumulation: int, epochs: int = 1) -> list[set[int]]:
    """The samples of every optimizer step, over all ranks."""
    configuration = Recipe(strategy="ddp", world_size=world, accumulation=accumulation).plan().configuration
    per_rank: list[list[Sequence[int]]] = []
    for rank in range(world):
        # The seed is rank 0's where there are several ranks; here every rank is this process.
        environment = Environment(
            rank=rank, local_rank=rank, world_size=world, local_world_size=world, device=torch.device("cpu")
        )
        loader = ShardedLoader(Numbers(samples), configuration, environment, LoaderSettings(seed=7))
        batches = [batch for _ in range(epochs) for batch in handed_out(loader)]
        assert len(batches) == epochs * len(loader)
        per_rank.append([list(chain(*batches[i : i + accumulation])) for i in range(0, len(batches), accumulation)])
    return [set().union(*parts) for parts in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 3), (2, 1), (2, 3), (4, 1), (6, 2)])
def test_steps_see_the_same_samples_under_every_plan(world: int, accumulation: int) -> None:
    assert global_batches(61, world, accumulation, epochs=2) == global_batches(61, 1, 1, epochs=2)


def test_an_epoch_holds_every_sample_once_and_the_next_is_another_order() -> None:
    batches = global_batches(60, 2, 3, epochs=2)
    first, second = batches[:5], batches[5:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(60))
    assert first != second


def test_samples_that_fill_no_global_batch_are_left_out() -> None:
    assert len(global_batches(35, 2, 3)) == 2


def test_the_scripts_seed_decides_the_order() -> None:
    configuration = Recipe().plan().configuration
    alone = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))

    def order(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return [batch.tolist() for batch in ShardedLoader(Numbers(60), configuration, alone)]

    assert order(1) == order(1)
    assert order(1) != order(2)
