"""A data loader of a script that goes on where it was: the batches of the epoch that are trained are passed over.

torch's `DataLoader` has no place that can be saved. Its batches follow from its sampler, and from the state of the
random numbers when that was asked for its first; both are the same again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

Batches = Any


class ResumableBatches:
    """A batch sampler that passes over the batches of an interrupted epoch once, without reading their samples.

    `began` is the state of torch's random numbers when the epoch's first batch was drawn.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._skip, self._from = 0, torch.empty(0)
        self._then: Callable[[], object] = lambda: None
        self.began = torch.get_rng_state()

    def resume(self, trained: int, began: torch.Tensor, then: Callable[[], object]) -> None:
        """Let the next epoch begin after `trained` batches; `then` brings the random numbers to where they were."""
        self._skip, self._from, self._then = trained, began, then

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if skip:
            torch.set_rng_state(self._from)
        self.began = torch.get_rng_state()
        batches = iter(self._batches)
        for _ in range(skip):
            next(batches, None)
        if skip:
            self._then()
        yield from batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_batches"], name)


def resumable(loader: Any) -> ResumableBatches | None:
    """Make a loader resumable, in place; None where it is none whose batches a sampler chooses."""
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        return None
    if isinstance(loader.batch_sampler, ResumableBatches):
        return loader.batch_sampler
    batches = ResumableBatches(loader.batch_sampler)
    vars(loader)["batch_sampler"] = batches  # setting it like any attribute is refused
    return batches


def has_plain_batches(loader: Any) -> bool:
    """Return whether a loader takes its sampler's samples as they come, so that its batches may have another size."""
    return isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler


def cut(loader: Any, batch_size: int) -> None:
    """Give a loader with plain batches this size, in place."""
    if has_plain_batches(loader):
        vars(loader)["batch_size"] = loader.batch_sampler.batch_size = batch_size
