"""A script's data loader goes on after a restart with the batches that an undisturbed epoch has left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from strategies.integrations.resumable_data import cut, has_plain_batches, resumable


class Noted(torch.utils.data.Dataset[int]):
    """Ten samples, and which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index + int(torch.randint(1000, ())) * 100  # augmented, as images are


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_goes_on_with_the_same_samples_and_random_numbers_and_reads_no_others() -> None:
    torch.manual_seed(5)
    loader = DataLoader(Noted(), batch_size=2, shuffle=True)
    batches = resumable(loader)
    assert batches is not None
    expected = []
    for index, batch in enumerate(loader):
        expected.append(batch)
        if index == 2:
            began, there = batches.began, torch.get_rng_state()

    torch.manual_seed(99)
    again = Noted()
    loader = DataLoader(again, batch_size=2, shuffle=True)
    batches = resumable(loader)
    assert batches is not None
    batches.resume(3, began, lambda: torch.set_rng_state(there))
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected[3:]]
    assert len(again.read) == 4
    assert len(list(loader)) == 5  # the epoch after is whole
    assert resumable(loader) is batches


def test_streams_and_other_loaders_are_not_resumable() -> None:
    assert resumable(DataLoader(Stream())) is None
    assert resumable([1, 2]) is None
    assert resumable(DataLoader(Noted(), batch_size=None)) is None


@pytest.mark.parametrize(("plain", "lengths"), [(True, [5, 5]), (False, [4, 4, 2])])
def test_batches_take_another_size_where_the_script_did_not_choose_them(plain: bool, lengths: list[int]) -> None:
    chosen = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader = DataLoader(Noted(), batch_size=4) if plain else DataLoader(Noted(), batch_sampler=chosen)
    assert has_plain_batches(loader) is plain
    cut(loader, 5)
    assert [len(batch) for batch in loader] == lengths
    assert loader.batch_size == (5 if plain else None)
