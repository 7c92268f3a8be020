"""Data for data-parallel ranks: every rank gets its own micro-batches, all of them together the global batch.

The place in the data is an epoch and how many of its samples have been trained on. Both mean the same however many
ranks share the samples, so a run resumes in the middle of an epoch on any number of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, default_collate

from hardware_db.notices import label_lines
from planner.types.plan import Configuration
from strategies.config.values import DataSection
from strategies.distributed.environment import Environment
from strategies.distributed.launcher_env import read_own_variables
from strategies.errors import CannotRun
from strategies.parallel.mesh import Mesh
from strategies.run_directory.heartbeat import beat

# Samples that cannot be read; a limited number of them is skipped.
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
        for candidate in range(index, index + self._length):
            number = candidate % self._length
            try:
                return self._dataset[number], met
            except Exception as problem:
                met.append((number, f"{type(problem).__name__}: {problem}"))
        raise CannotRun(f"no sample of training_data can be read; sample {met[0][0]}: {met[0][1]}")


def collate_with(collate: Collate) -> Collate:
    """Return a collator of a batch, and what could not be read for it, from the samples of a `Tolerant` dataset."""
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
        """Number of samples that could not be read so far."""
        return len(self._seen)

    def note(self, batch_and_met: tuple[Any, list[tuple[int, str]]]) -> Any:
        """Return the batch, and warn of each new bad sample.

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
            warnings.warn(label_lines(f"sample {number} of training_data is left out ({problem})"), stacklevel=2)
        return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """Settings of reading samples and putting them together."""

    section: DataSection = field(default_factory=DataSection)
    """Of the script's config."""
    collate: Collate | None = None
    """None for `default_collate`."""


class ShardedLoader:
    """A rank's share of a dataset in micro-batches, shuffled anew every epoch.

    The order of samples depends on the seed alone: however many ranks share it and however often they accumulate, step
    i trains on the same global batch. Samples that do not fill a global batch are left out of that epoch.

    Iterating begins where the last step ended after `load_state_dict`, else with a new epoch. The engine reports by
    `trained` which batches have been trained on; those that workers have read ahead do not count.

    Raises:
        CannotRun: the dataset has no length, or less than one global batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        configuration: Configuration,
        environment: Environment,
        settings: LoaderSettings | None = None,
    ) -> None:
        settings = settings or LoaderSettings()
        section = settings.section
        self.dataset = dataset
        self.epoch = 0
        self.samples = 0
        self.seed = _shared_seed(environment) if section.seed is None else section.seed
        self._length = _length(dataset, configuration)
        self._configuration = configuration
        self._bad = BadSamples(section.bad_samples)
        self._handed_out = 0
        self._passes = self._skipped_passes = 0
        self._continues = True
        self._worker_seeds = torch.Generator()
        mesh = Mesh.of(configuration, environment)
        self._part, self._parts = mesh.rank("dp"), mesh.size("dp")
        self._batches = _Order(configuration, self._part)
        self._tolerates = tolerates = section.bad_samples > 0
        collate = settings.collate or default_collate
        self._loader: DataLoader[Any] = DataLoader(
            Tolerant(dataset, self._length) if tolerates else dataset,
            batch_sampler=self._batches,
            num_workers=section.num_workers,
            pin_memory=environment.device.type == "cuda" if section.pin_memory is None else section.pin_memory,
            collate_fn=collate_with(collate) if tolerates else collate,
            persistent_workers=section.num_workers > 0,
            generator=self._worker_seeds,
        )

    @property
    def bad_samples(self) -> int:
        """Number of samples of this rank that could not be read so far."""
        return self._bad.count

    def __len__(self) -> int:
        """Return the micro-batches per epoch: whole global batches only."""
        configuration = self._configuration
        return self._length // configuration.global_batch_size * configuration.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._skipped_passes >= self._passes:
            return iter(())
        if self.samples and not self._continues:
            self.epoch, self.samples = self.epoch + 1, 0
        self._continues = False
        self._handed_out = self.samples
        return self._rest_of_epoch()

    def trained(self) -> None:
        """Count what was handed out so far: the engine has made a step of it."""
        self.samples = self._handed_out

    def get_sampler(self) -> Sampler[list[int]]:
        """Return what chooses this rank's micro-batches: lists of sample numbers, of the pass that is under way."""
        return self._batches

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data, as JSON; the same on every rank and for any number of ranks."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "seed": self.seed,
            "length": self._length,
            "passes": self._passes,
        }

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Check a place that `state_dict` gave, maybe on another number of ranks.

        Raises:
            CannotRun: the place is in a dataset of another length, or is none.
        """
        length = state.get("length", self._length)
        if length != self._length:
            raise CannotRun(
                f"the checkpoint's place in the data is in {length} samples and training_data has {self._length}; pass"
                " the same dataset, or set engine.dataloader = None before load_checkpoint to begin it anew"
            )
        most = {"epoch": 2**31, "samples": self._length, "seed": 2**62, "passes": 2**31}
        for name, largest in most.items():
            value = state.get(name, 0 if name == "passes" else None)
            if type(value) is not int or not 0 <= value <= largest:
                raise CannotRun(
                    f"the checkpoint's place in the data has {value!r} as {name}; name another checkpoint, or set"
                    " engine.dataloader = None before load_checkpoint to begin it anew"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` gave, on whatever number of ranks.

        Raises:
            CannotRun: as `require_state`.
        """
        self.require_state(state)
        self.epoch, self.samples, self.seed = state["epoch"], state["samples"], state["seed"]
        self._passes = state.get("passes", 0)
        self._continues = True

    def skip_trained_passes(self) -> None:
        """Begin the script's loops over the data anew, with nothing in those that are over at the place gone to.

        For a script that was started again and knows nothing of it: `for epoch in range(3)` then ends where it would
        have ended.
        """
        self._skipped_passes = max(0, self._passes - 1) if self.samples else self._passes
        self._passes = 0

    def skip_nothing(self) -> None:
        """Leave it to the script, which knows that it was started again, to count its loops."""
        self._passes, self._skipped_passes = self._passes + self._skipped_passes, 0

    def _rest_of_epoch(self) -> Iterator[Any]:
        configuration, epoch = self._configuration, self.epoch
        global_batches = (self._length - self.samples) // configuration.global_batch_size
        last = self.samples + global_batches * configuration.global_batch_size
        # A seed of its own: torch would draw it from the random state that the model's dropout resumes from.
        self._worker_seeds.manual_seed(self.seed + epoch * self._parts + self._part)
        self._batches.order = _permutation(self._length, self.seed + epoch)[self.samples : last]
        for batch in self._loader:
            beat()
            self._handed_out += configuration.samples_together
            yield self._bad.note(batch) if self._tolerates else batch
        if self.epoch == epoch and self.samples == last:
            self.epoch, self.samples = epoch + 1, 0


class DistributedDataLoader(DataLoader[Any]):
    """A torch DataLoader over this rank's share of a dataset, shuffled anew in every pass, which counts as an epoch.

    Args:
        shuffle: in an order that `seed` decides, the same on every rank.
        pin_memory: has no meaning without a GPU and is left out there.
        options: further arguments of torch's DataLoader.

    Raises:
        CannotRun: the dataset has no length, or a sampler is given too.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        pin_memory: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise CannotRun("DistributedDataLoader: the dataset has no length, so it cannot be split over ranks")
        if given := sorted({"sampler", "batch_sampler"} & options.keys()):
            raise CannotRun(f"DistributedDataLoader makes its own sampler; leave {given[0]}= out")
        process = read_own_variables()
        self._passes = 0
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, process.world_size, process.rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        pins = pin_memory and torch.cuda.is_available()
        super().__init__(dataset, batch_size, sampler=sampler, drop_last=drop_last, pin_memory=pins, **options)

    def get_sampler(self) -> DistributedSampler[Any]:
        """Return the sampler that chooses this rank's samples; its `set_epoch` decides the next pass's order."""
        sampler: Any = self.sampler
        return cast("DistributedSampler[Any]", sampler)

    def __iter__(self) -> Any:
        sampler = self.get_sampler()
        if sampler.epoch < self._passes:  # the script does not count epochs itself
            sampler.set_epoch(self._passes)
        self._passes = sampler.epoch + 1
        return super().__iter__()


class _Order(Sampler[list[int]]):
    """A batch sampler of a rank's part of `order`, [samples], of which neighbours go to different ranks.

    Where ranks have micro-batches of different sizes each takes its own run of neighbours.
    """

    def __init__(self, configuration: Configuration, part: int) -> None:
        self.order = torch.empty(0, dtype=torch.int64)
        self._together, self._size = configuration.samples_together, configuration.micro_batch_of(part)
        if configuration.is_uneven:
            first = configuration.samples_before(part)
            self._own = slice(first, first + self._size)
        else:
            self._own = slice(part, None, configuration.dims.data_parallel)

    def __len__(self) -> int:
        return len(self.order) // self._together

    def __iter__(self) -> Iterator[list[int]]:
        whole = (self.order[first : first + self._together] for first in range(0, len(self.order), self._together))
        return (samples[self._own].tolist() for samples in whole)


def _permutation(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


def _length(dataset: Dataset[Any], configuration: Configuration) -> int:
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
    return samples


def _shared_seed(environment: Environment) -> int:
    """Return rank 0's torch seed: a script that seeds torch decides the order of samples too."""
    seed = [torch.initial_seed() % 2**31]
    if environment.world_size > 1:
        dist.broadcast_object_list(seed, src=0)
    return seed[0]
