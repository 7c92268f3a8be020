"""DeepSpeed's cut of parameters over ranks: one flat partition in stages 1 and 2, tensor by tensor in stage 3."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from hardware_db.records import dataclass
from planner.cost.memory.units import Units, trained_units_of, units_of
from planner.cost.precision import QUANTISED_STATES
from planner.cost.zero_bucket_sizes import owning_ranks
from planner.types.job import Job
from planner.types.plan import Configuration

_ALIGNMENT = 2
"""Elements that a rank's part of the flat group is a multiple of (`stage_1_and_2.py`, nccl_start_alignment_factor)."""
_RANKS_LOOKED_AT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatPartition:
    """Elements of a flat partition.

    `whole`: the flat group with its padding; `size`: a rank's part; `touched`: the tensors that lie in it wholly or in
    part, whole, on the rank where they are the most; `largest`: the largest tensor.
    """

    whole: int
    size: int
    touched: int
    largest: int

    @property
    def largest_piece(self) -> int:
        """The most of one tensor that lies in a part."""
        return min(self.largest, self.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPartitions:
    """Elements of tensors that are partitioned one by one.

    `whole`: all tensors; `local`: a rank's parts of them; `persisted`: the tensors that are never freed; `largest`: the
    largest tensor.
    """

    whole: int
    local: int
    persisted: int
    largest: int


def flat_partition(job: Job) -> FlatPartition:
    """Return the flat group of all that is trained, in the order of the model, cut evenly over the data-parallel ranks.

    Experts that are spread over ranks are a group of their own, over fewer.
    """
    chosen, units = job.configuration, trained_units_of(job)
    if chosen.expert_shards == chosen.state_shards:
        return _flat(chosen.state_shards, _in_order(units))
    dense, experts = _flat(chosen.state_shards, _in_order(units)), round(units.experts)
    share = experts / max(units.elements, 1)
    part = -(-experts // chosen.expert_shards)
    return FlatPartition(
        whole=dense.whole,
        size=round(dense.size * (1 - share)) + part,
        touched=round(dense.touched * (1 - share)) + part,
        largest=dense.largest,
    )


def tensor_partitions(job: Job, persistence_threshold: int) -> TensorPartitions:
    """Every tensor flattened and cut evenly over the data-parallel ranks, its last part padded."""
    return _by_tensor(job.configuration.state_shards, persistence_threshold, tensors_of(job))


def trained_partitions(job: Job, persistence_threshold: int) -> TensorPartitions:
    """Return the partitions of what is trained."""
    return _by_tensor(job.configuration.state_shards, persistence_threshold, trained_tensors_of(job))


def tensors_of(job: Job) -> tuple[int, ...]:
    """Elements of every tensor of the job's pipeline stage, in the order of the model."""
    return _in_order(units_of(job))


def trained_tensors_of(job: Job) -> tuple[int, ...]:
    """Return the trained tensors' elements, without frozen ones."""
    return _in_order(trained_units_of(job))


def _in_order(units: Units) -> tuple[int, ...]:
    blocks = [size for block in units.blocks for _ in range(round(block.repeats)) for size in block.sizes]
    return (*units.embedding, *blocks, *units.ending)


@lru_cache(maxsize=256)
def _flat(ranks: int, tensors: tuple[int, ...]) -> FlatPartition:
    ends = list(accumulate(tensors))
    size = -(-ends[-1] // (_ALIGNMENT * ranks)) * _ALIGNMENT
    looked_at = range(0, ranks, max(1, ranks // _RANKS_LOOKED_AT))
    return FlatPartition(
        whole=size * ranks,
        size=size,
        touched=max(_touched(tensors, ends, rank * size, (rank + 1) * size) for rank in looked_at),
        largest=max(tensors),
    )


def _touched(tensors: Sequence[int], ends: Sequence[int], start: int, stop: int) -> int:
    """Elements of the tensors that lie between `start` and `stop`, in part too; `ends` are their ends."""
    first = bisect_right(ends, start)
    last = min(bisect_left(ends, stop), len(ends) - 1)
    return ends[last] - ends[first] + tensors[first] if first <= last else 0


@lru_cache(maxsize=256)
def _by_tensor(ranks: int, threshold: int, tensors: tuple[int, ...]) -> TensorPartitions:
    return TensorPartitions(
        whole=sum(tensors),
        local=sum(-(-size // ranks) for size in tensors),
        persisted=sum(size for size in tensors if size <= threshold) if ranks > 1 else 0,
        largest=max(tensors),
    )


# Balance of optimizer states over ranks for optimizers that step every tensor whole.


_WHOLE = ("adafactor", "muon", *QUANTISED_STATES)


def steps_whole_tensors(configuration: Configuration) -> bool:
    """Return whether each tensor's states are on one rank."""
    return configuration.backend == "native" and configuration.optimizer in _WHOLE


def largest_share(job: Job) -> float:
    """Return the part of all elements whose states are on the rank that has most of them."""
    ranks = job.configuration.state_shards
    if ranks == 1 or not steps_whole_tensors(job.configuration):
        return 1 / ranks
    return _largest_share(trained_tensors_of(job), ranks)


@lru_cache(maxsize=64)
def _largest_share(sizes: tuple[int, ...], ranks: int) -> float:
    loads = [0] * ranks
    for size, owner in zip(sizes, owning_ranks(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads) / sum(sizes)
