"""Replacing a callable of another library, in one place that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def patch(owner: object, name: str, replacement: object) -> None:
    """Put `replacement` where `owner.name` was; the caller keeps the original and calls it."""
    setattr(owner, name, replacement)


# A data loader with another batch size.


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any] | None:
    """Return the same data in the same order in batches of `batch_size`, or None if the script batches it itself."""
    from torch.utils.data import BatchSampler, DataLoader  # some hooks are put while torch is being imported

    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return None
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
