"""Samples that cannot be read: a run goes on without up to so many of them.

A sample that raises is replaced by the next of the dataset that can be read, so that micro-batches keep their size, and
which one that is does not depend on the number of ranks. Workers read samples in other processes; what they met travels
beside each batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from strategies.errors import CannotRun

Collate = Callable[[list[Any]], Any]


class Tolerant(Dataset[Any]):
    """A dataset whose samples are (sample, what could not be read in its place).

    Raises:
        CannotRun: no sample of the dataset can be read.
    """

    def __init__(self, dataset: Dataset[Any], length: int) -> None:
        self._dataset, self._length = dataset, length

    def __getitem__(self, index: int) -> tuple[Any, list[tuple[int, str]]]:
        met: list[tuple[int, str]] = []
        for place in range(index, index + self._length):
            number = place % self._length
            try:
                return self._dataset[number], met
            except Exception as problem:
                met.append((number, f"{type(problem).__name__}: {problem}"))
        raise CannotRun(f"no sample of training_data can be read; sample {met[0][0]}: {met[0][1]}")


def collate_with(collate: Collate) -> Collate:
    """A batch and what could not be read for it, from the samples of a `Tolerant` dataset."""
    return partial(_collated, collate)


def _collated(collate: Collate, samples: list[Any]) -> tuple[Any, list[tuple[int, str]]]:
    return collate([sample for sample, _ in samples]), [problem for _, met in samples for problem in met]


class BadSamples:
    """Counts the distinct samples that could not be read, up to `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._seen)

    def noted(self, batch_and_met: tuple[Any, list[tuple[int, str]]]) -> Any:
        """The batch; warns of each new bad sample.

        Raises:
            CannotRun: there are more of them than the limit.
        """
        batch, met = batch_and_met
        for number, problem in met:
            if number in self._seen:
                continue
            self._seen.add(number)
            if self.count > self._limit:
                raise CannotRun(
                    f"sample {number} of training_data cannot be read ({problem}), the {self.count}th on this rank;"
                    f" repair the data or raise dataloader.bad_samples, which is {self._limit}"
                )
            warnings.warn(f"dsplan: sample {number} of training_data is left out ({problem})", stacklevel=2)
        return batch
