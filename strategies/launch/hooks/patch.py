"""Replacing a callable of another library, in one place that says so."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def patch(owner: object, name: str, replacement: object) -> None:
    """Put `replacement` where `owner.name` was; the caller keeps the original and calls it."""
    setattr(owner, name, replacement)


# A data loader with another batch size.


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any] | None:
    """Return the same data in the same order in batches of `batch_size`, or None if the script batches it itself."""
    from torch.utils.data import BatchSampler  # some hooks are put while torch is being imported

    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return None
    changed = copy.copy(loader)
    batches = BatchSampler(loader.sampler, batch_size, loader.drop_last)
    vars(changed).update(batch_size=batch_size, batch_sampler=batches)  # setting them like any attribute is refused
    return changed
