"""Data for data-parallel ranks: every rank gets its own micro-batches, all of them together the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from planner.plan import Configuration
from strategies.environment import Environment
from strategies.errors import CannotRun


class ShardedLoader(DataLoader[Any]):
    """A rank's share of a dataset in micro-batches, shuffled anew every time it is iterated.

    The order of samples depends on `seed` alone, rank 0's torch seed where None is given: however many ranks share it
    and however often they accumulate, step i trains on the same global batch. Samples that do not fill a global batch
    are left out of that epoch.

    Raises:
        CannotRun: the dataset has no length, or less than one global batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        configuration: Configuration,
        environment: Environment,
        *,
        seed: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise CannotRun(
                "training_data is an IterableDataset, which only its author can split over ranks; pass a dataset with"
                " a length, or build the DataLoader in the script"
            )
        sized: Any = dataset
        samples = len(sized)
        if samples < configuration.global_batch_size:
            raise CannotRun(
                f"training_data has {samples} samples and a global batch takes {configuration.global_batch_size};"
                " lower train_batch_size"
            )
        self._order: DistributedSampler[Any] = DistributedSampler(
            dataset,
            num_replicas=environment.world_size,
            rank=environment.rank,
            seed=_shared_seed(environment) if seed is None else seed,
            drop_last=True,
        )
        self._epoch = 0
        self._accumulation = configuration.gradient_accumulation_steps
        super().__init__(dataset, batch_size=configuration.micro_batch_size, sampler=self._order, drop_last=True)

    def __len__(self) -> int:
        """Micro-batches per epoch: whole global batches only."""
        return super().__len__() // self._accumulation * self._accumulation

    def __iter__(self) -> Any:
        self._order.set_epoch(self._epoch)
        self._epoch += 1
        batches = super().__iter__()
        return (batch for _, batch in zip(range(len(self)), batches, strict=False))


def _shared_seed(environment: Environment) -> int:
    """Rank 0's torch seed: a script that seeds torch decides the order of samples too."""
    seed = [torch.initial_seed() % 2**31]
    if environment.world_size > 1:
        dist.broadcast_object_list(seed, src=0)
    return seed[0]
