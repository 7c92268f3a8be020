"""Batches as scripts hold them, and what of them a module is called with."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from strategies.tracing.example import example_batch, examples_for, first_samples, longest_tokens

IMAGES, LABELS, IDS = torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.long), torch.zeros(5, 7, dtype=torch.long)


class Takes(nn.Module):
    """Something of each kind of forward."""

    def images(self, images: Any) -> Any: ...

    def masked(self, images: Any, mask: Any = None) -> Any: ...

    def named(self, *, input_ids: Any = None, labels: Any = None) -> Any: ...

    def denoised(self, sample: Any, timestep: Any, states: Any, *, scale: float = 1.0) -> Any: ...

    def anything(self, *args: Any, **kwargs: Any) -> Any: ...


def _taking(name: str) -> nn.Module:
    module: Any = Takes()
    module.forward = getattr(module, name)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "batch", "arguments"),
    [
        ("images", IMAGES, [((5, 3, 8, 8),)]),
        ("images", [IMAGES, LABELS], [((5, 3, 8, 8),)]),
        ("images", {"image": IMAGES, "label": LABELS}, [((5, 3, 8, 8),)]),
        ("masked", (IMAGES, LABELS), [((5, 3, 8, 8), (5,)), ((5, 3, 8, 8),)]),
        ("named", {"input_ids": IDS, "labels": IDS, "text": ["a"] * 5}, [{"input_ids": (5, 7), "labels": (5, 7)}]),
        ("denoised", ((IMAGES,), {"timestep": torch.tensor(1), "states": IDS}), [{"timestep": (), "states": (5, 7)}]),
        ("anything", {"left": IMAGES, "right": LABELS}, [{"left": (5, 3, 8, 8), "right": (5,)}]),
    ],
)
def test_a_module_is_called_with_what_it_takes_of_a_batch(forward: str, batch: Any, arguments: list[Any]) -> None:
    examples = list(examples_for(_taking(forward), batch))
    for example, expected in zip(examples, arguments, strict=True):
        positional, named = example.batch_of(5)
        if isinstance(expected, dict):
            assert {name: tuple(value.shape) for name, value in named.items()} == expected
        else:
            assert tuple(tuple(value.shape) for value in positional) == expected


def test_only_what_has_a_row_for_each_sample_grows() -> None:
    batch = ((IMAGES, torch.zeros(1, 8)), {"step": torch.tensor(3), "scale": 0.5, "pair": [IDS, IDS]})
    example = next(examples_for(_taking("anything"), batch))
    (images, table), named = example.batch_of(64)
    assert (images.shape[0], table.shape[0], named["step"].dim(), named["scale"]) == (64, 1, 0, 0.5)
    assert [part.shape[0] for part in named["pair"]] == [64, 64]
    assert images.is_meta


def test_channels_last_stays_so() -> None:
    images = IMAGES.to(memory_format=torch.channels_last)
    (resized,), _ = next(examples_for(_taking("images"), images)).batch_of(2)
    assert resized.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("forward", "batch", "tokens", "positions"),
    [
        ("named", {"input_ids": IDS, "labels": IDS}, 7, 7),
        ("images", [IMAGES, LABELS], 0, 1),
        ("images", [torch.zeros(5, 20, 4), LABELS], 0, 20),
        ("images", [torch.zeros(5, 4), IDS], 0, 1),
    ],
)
def test_tokens_are_those_that_the_module_takes(forward: str, batch: Any, tokens: int, positions: int) -> None:
    example = next(examples_for(_taking(forward), batch))
    assert (example.tokens, example.positions) == (tokens, positions)


@pytest.mark.parametrize(
    ("item", "length"),
    [({"input_ids": [1, 2, 3]}, 3), ({"pixel_values": IMAGES}, 0), ((3, IMAGES), 0), ([IMAGES, LABELS], 0), (IDS, 7)],
)
def test_token_ids_are_told_from_labels_and_images(item: Any, length: int) -> None:
    assert longest_tokens(item) == length


class _Cropped(Dataset[tuple[torch.Tensor, int]]):
    """Samples that differ by chance in what they hold, and in length."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(index + 1) + random.random(), index


def test_looking_at_samples_leaves_the_random_numbers_of_training() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(3)
    random.seed(3)
    assert len(first_samples(_Cropped())) == 16
    assert (torch.rand(1).item(), random.random()) == expected


def test_samples_of_many_lengths_make_a_batch_of_the_first() -> None:
    images, labels = example_batch(_Cropped())
    assert images.shape == (2, 1)
    assert labels.tolist() == [0, 0]


def test_no_batch_is_made_of_nothing_or_of_what_would_be_lost() -> None:
    assert example_batch(None) is None
    assert example_batch(iter([torch.zeros(3)])) is None
    assert example_batch([object(), object()]) is None
