"""Bucket and prefetch sizes of ZeRO, shared by the memory model that counts them and the configs that set them.

Our own ZeRO's dealing of tensors out to buckets, to ranks and to the host is here too, shared with the engine.

Stages 1 and 2 keep DeepSpeed's own 5e8 elements (`deepspeed/runtime/zero/config.py`), but never more than the model
has: the buffers are allocated whole, and 1 GB of buffer for a 125M model would be waste. Stage 3 takes the sizes that
transformers fills in for `auto` (`transformers/integrations/deepspeed.py`): hidden^2, 0.9 hidden^2 and 10 hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

from hardware_db.records import dataclass

_DEEPSPEED_BUCKET = 500_000_000
_DEEPSPEED_LIVE = 1_000_000_000
NATIVE_BUCKET = 16 * 2**20
NATIVE_CPU_BUCKET = 2**20
NATIVE_STEP_RUNS = 16
"""In this many parts our own ZeRO gives gradients the masters' wider dtype: each costs a call of the optimizer, and a
rank holds a sixteenth of them twice, or one bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuckets:
    """Elements, not bytes. With `overlap_comm` two reduce buckets are alive: one fills while the other is reduced.

    `prefetch`, `persistence_threshold`, `max_live`, `max_reuse_distance` matter to stage 3 only.
    """

    reduce: int
    allgather: int
    overlap_comm: bool = True
    prefetch: int = 0
    persistence_threshold: int = 0
    max_live: int = _DEEPSPEED_LIVE
    max_reuse_distance: int = _DEEPSPEED_LIVE
    sub_group: int = _DEEPSPEED_LIVE


def zero_buckets(stage: int, *, parameters: int, hidden_size: int) -> ZeroBuckets:
    """Return the sizes used for a model of `parameters` elements and width `hidden_size` at ZeRO `stage` 0 to 3."""
    whole = min(_DEEPSPEED_BUCKET, parameters + parameters % 2)  # DeepSpeed asserts that stages 1 and 2 have even ones
    if stage < 3:
        return ZeroBuckets(reduce=whole, allgather=whole)
    square = hidden_size * hidden_size
    return ZeroBuckets(
        reduce=min(square, parameters),
        allgather=whole,
        prefetch=min(int(0.9 * square), parameters),
        persistence_threshold=10 * hidden_size,
    )


def native_buckets(stage: int, *, hidden_size: int, on_cpu: bool) -> ZeroBuckets:
    """Return the sizes of our own ZeRO: gradients travel and wait in small buckets, and larger tensors as they are.

    A GPU's links need tens of megabytes to reach their rate; between ranks on CPUs a few do, and a smaller
    bucket means fewer copies. Small parameters stay whole in stage 3 by the same threshold as DeepSpeed's.
    """
    reduce = NATIVE_CPU_BUCKET if on_cpu else NATIVE_BUCKET
    return ZeroBuckets(reduce=reduce, allgather=reduce, persistence_threshold=10 * hidden_size if stage == 3 else 0)


def bucket_members(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the indices of the tensors that share a bucket of at most `limit` elements, in their order.

    A larger one has a bucket to itself.

    A tensor of half the limit or more is alone too: its gradient then travels as it is, without a copy.
    """
    buckets: list[list[int]] = []
    together: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if 2 * size >= limit:
            buckets.append([index])
            continue
        if filled + size > limit:
            buckets.append(together)
            together, filled = [], 0
        together.append(index)
        filled += size
    return [*buckets, together] if together else buckets


def owning_ranks(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each undivided tensor: the largest first, to the rank that has least so far.

    The most that a rank has is at most 4/3 of the best there is (Graham 1969), and never less than the largest tensor.
    """
    loads = [(0, rank) for rank in range(ranks)]  # in order, and so a heap
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owners[index] = loads[0]
        heapreplace(loads, (load + sizes[index], owners[index]))
    return owners


class OffloadRatio:
    """Says bucket by bucket which are offloaded, so that at any moment nearly `ratio` of all elements so far are."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._seen = self._taken = 0

    def takes(self, elements: int) -> bool:
        """Return whether the next bucket, of so many elements, is offloaded: where that is nearer to the ratio."""
        self._seen += elements
        if self._taken + elements / 2 > self._ratio * self._seen:
            return False
        self._taken += elements
        return True
