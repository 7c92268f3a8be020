"""NVMe: masters and optimizer states in a file, of which host memory holds a few buckets while they are stepped.

While one bucket is stepped the next is read and the last is written (Rajbhandari et al. 2021, ZeRO-Infinity). Between
steps the tensors of the optimizer are views of the file, mapped into memory: checkpoints and scripts read and write
them as any others, and the kernel keeps as much of them in memory as nobody else needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from strategies.zero.optimizer import Pieces
from strategies.zero.partition import Bucket
from strategies.zero.swap_file import Shelf, SwapFile

_SMALLEST = 4096
"""Bytes from which a state is worth a place in the file; smaller ones stay in memory."""
_MASTER = "master"


class Disk:
    """The states of the buckets that live in a file below `directory`; at most `buffers` of them are in memory."""

    def __init__(self, directory: Path, buffers: int) -> None:
        self._file = SwapFile(directory)
        self._buffers = buffers
        self._shelves: dict[Bucket, Shelf] = {}
        self._reader, self._writer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dsplan-nvme-{way}") for way in ("read", "write")
        )

    def adopt(self, bucket: Bucket) -> None:
        """Move a bucket's master to the file, unless it is the weights themselves, which are needed in memory."""
        shelf = self._shelves[bucket] = Shelf(self._file)
        if bucket.master is not bucket.part and bucket.master.numel():
            shelf.add({_MASTER: bucket.master})
            bucket.master = shelf.mapped(_MASTER)

    def visited(self, buckets: Sequence[Bucket], pieces: Pieces, optimizer: torch.optim.Optimizer) -> Iterator[Bucket]:
        """The buckets one after the other, each with its states in memory until the next one is asked for."""
        coming: deque[Future[torch.Tensor]] = deque()
        leaving: deque[Future[None]] = deque()
        shelves = [self._shelves[bucket] for bucket in buckets]

        def ask(place: int, *, leave: int) -> None:
            if place < len(shelves):
                while len(leaving) > leave:
                    leaving.popleft().result()
                coming.append(self._reader.submit(shelves[place].read, shelves[place].room()))

        try:
            for place, bucket in enumerate(buckets):
                if not coming:
                    ask(place, leave=0)
                memory = coming.popleft().result()
                if self._buffers > 1:
                    ask(place + 1, leave=max(self._buffers - 2, 0))
                states = _States(bucket, shelves[place], pieces, optimizer)
                states.bring(memory)
                yield bucket
                states.put_back(memory)
                leaving.append(self._writer.submit(shelves[place].write, memory))
        finally:
            wait(coming)
            wait(leaving)
        for written in leaving:
            written.result()


class _States:
    """The tensors of a bucket that its shelf has, or will have."""

    def __init__(self, bucket: Bucket, shelf: Shelf, pieces: Pieces, optimizer: torch.optim.Optimizer) -> None:
        self._bucket, self._shelf, self._pieces = bucket, shelf, pieces
        self._optimizer = optimizer

    def bring(self, memory: torch.Tensor) -> None:
        """Let pieces and states be views of memory; what came by another way (a checkpoint) stays what it is."""
        if self._shelf.holds(_MASTER):
            self._use_master(self._shelf.view(_MASTER, memory))
        for key, holder, value in self._each():
            if self._shelf.holds(key, value) and value.data_ptr() == self._shelf.mapped(key).data_ptr():
                holder[key[1]] = self._shelf.view(key, memory)

    def put_back(self, memory: torch.Tensor) -> None:
        """Let pieces and states be views of the file, which is about to have what `memory` has; new states go there
        at once."""
        if self._shelf.holds(_MASTER):
            self._use_master(self._shelf.mapped(_MASTER))
        new: dict[Hashable, torch.Tensor] = {}
        for key, _, value in self._each():
            if not self._shelf.holds(key, value):
                new[key] = value
            elif value.data_ptr() != (place := self._shelf.view(key, memory)).data_ptr():
                place.copy_(value)
        self._shelf.add(new)
        for key, holder, _ in self._each():
            holder[key[1]] = self._shelf.mapped(key)

    def _use_master(self, master: torch.Tensor) -> None:
        self._bucket.master = master
        for slot in self._bucket.slots:
            piece = self._pieces.of[slot.parameter]
            start, stop = self._bucket.own_range(slot)
            piece.data = master[start:stop].view(piece.shape)

    def _each(self) -> list[tuple[tuple[int, str], dict[str, Any], torch.Tensor]]:
        """Key, state and value of every tensor worth a place in the file."""
        found = []
        for number, slot in enumerate(self._bucket.slots):
            state = self._optimizer.state.get(self._pieces.of[slot.parameter], {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= _SMALLEST:
                    found.append(((number, name), state, value))
        return found
