"""NVMe: masters and optimizer states in a file, of which host memory holds a few buckets while they are stepped.

While one bucket is stepped the next is read and the last is written (Rajbhandari et al. 2021, ZeRO-Infinity). Between
steps the tensors of the optimizer are views of the file, mapped into memory: checkpoints and scripts read and write
them as any others, and the kernel keeps as much of them in memory as nobody else needs.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardware_db.units import format_bytes
from strategies.backends.zero.flat_shard import Bucket
from strategies.backends.zero.optimizer import Pieces
from strategies.errors import CannotRun
from strategies.telemetry.memory_report import MAPPED_FILES

# An unlinked file for tensors, which is gone with its process, however that ends.


_ALIGNMENT = 64
"""Bytes; that of torch's own memory."""


class SwapFile:
    """Room on a disk, taken piece by piece; all of it is free again when the process ends.

    Raises:
        CannotRun: there cannot be such a file, or no room is left in it.
    """

    def __init__(self, directory: Path) -> None:
        if not hasattr(os, "preadv"):
            raise CannotRun("offload 'nvme' needs positional reads, which this system has not; use offload 'all'")
        self._directory, self._size = directory, 0
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - open as long as this is
        except OSError as problem:
            raise CannotRun(
                f"{directory}: optimizer states cannot be put there ({problem.strerror}); name a directory that is"
                " there, on a local disk, as nvme_path"
            ) from None

    def reserve(self, size: int) -> int:
        """Take `size` more bytes of the disk, so that it cannot be full when they are written, and return where."""
        start = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            _allocate(self._file.fileno(), start, size)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            state = os.statvfs(self._directory)
            free = format_bytes(state.f_bavail * state.f_frsize)
            raise CannotRun(
                f"{self._directory}: no room for {format_bytes(size)} more of optimizer states, {free} are free; free"
                " some, or name another disk as nvme_path"
            ) from None
        self._size = start + size
        return start

    def mapped(self, start: int, size: int) -> torch.Tensor:
        """Return bytes of the file as a tensor, [size]."""
        view = torch.frombuffer(mmap.mmap(self._file.fileno(), size, offset=start), dtype=torch.uint8)
        MAPPED_FILES[view.untyped_storage().data_ptr()] = view
        return view

    def read(self, start: int, memory: torch.Tensor) -> None:
        """Fill `memory` from the file."""
        view, filled = _bytes_of(memory), 0
        while filled < len(view):
            filled += os.preadv(self._file.fileno(), [view[filled:]], start + filled)

    def write(self, start: int, memory: torch.Tensor) -> None:
        """Write `memory` to the file."""
        view, written = _bytes_of(memory), 0
        while written < len(view):
            written += os.pwritev(self._file.fileno(), [view[written:]], start + written)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Extent:
    """Some of a shelf: where it lies in the file and in the shelf's memory, and a view of the file."""

    start: int
    begin: int
    mapped: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    """One tensor of a shelf; `begin` counts from its extent's."""

    extent: _Extent
    begin: int
    like: torch.Tensor

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor, out of its extent's bytes."""
        size = self.like.numel() * self.like.element_size()
        return memory[self.begin : self.begin + size].view(self.like.dtype).view(self.like.shape)


class Shelf:
    """Tensors that are read and written together, by keys."""

    def __init__(self, file: SwapFile) -> None:
        self._file, self._bytes = file, 0
        self._extents: list[_Extent] = []
        self._regions: dict[Hashable, _Region] = {}

    def holds(self, key: Hashable, like: torch.Tensor | None = None) -> bool:
        """Return whether there is such a tensor, of the dtype and shape of `like`."""
        region = self._regions.get(key)
        if region is None or like is None:
            return region is not None
        return (region.like.dtype, region.like.shape) == (like.dtype, like.shape)

    def add(self, tensors: Mapping[Hashable, torch.Tensor]) -> None:
        """Write tensors to a new place in the file."""
        begins, size = {}, 0
        for key, tensor in tensors.items():
            begins[key] = size
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if not size:
            return
        start = self._file.reserve(size)
        extent = _Extent(start=start, begin=self._bytes, mapped=self._file.mapped(start, size))
        self._extents.append(extent)
        self._bytes += size
        for key, tensor in tensors.items():
            self._file.write(start + begins[key], tensor.detach().contiguous())
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self._regions[key] = _Region(extent=extent, begin=begins[key], like=like)

    def mapped(self, key: Hashable) -> torch.Tensor:
        """Return a tensor as the file has it."""
        region = self._regions[key]
        return region.of(region.extent.mapped)

    def view(self, key: Hashable, memory: torch.Tensor) -> torch.Tensor:
        """Return a tensor as `memory`, which was read, has it."""
        region = self._regions[key]
        return region.of(memory[region.extent.begin :])

    def room(self) -> torch.Tensor:
        """Return memory for all bytes of the shelf."""
        return torch.empty(self._bytes, dtype=torch.uint8)

    def read(self, memory: torch.Tensor) -> torch.Tensor:
        """Fill `memory`, which `room` gave, from the file."""
        with torch.profiler.record_function("dsplan::read_states"):
            for extent in self._extents:
                self._file.read(extent.start, memory[extent.begin : extent.begin + extent.mapped.numel()])
        return memory

    def write(self, memory: torch.Tensor) -> None:
        """Put `memory`, which was read, back into the file; what was added since is there already."""
        with torch.profiler.record_function("dsplan::write_states"):
            for extent in self._extents:
                if extent.begin < memory.numel():
                    self._file.write(extent.start, memory[extent.begin : extent.begin + extent.mapped.numel()])


def _allocate(file: int, start: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
        return
    zeros = bytes(1 << 20)
    for at in range(start, start + size, len(zeros)):
        os.pwrite(file, zeros[: start + size - at], at)


def _bytes_of(memory: torch.Tensor) -> memoryview:
    size = memory.numel() * memory.element_size()
    return memoryview((ctypes.c_char * size).from_address(memory.data_ptr())).cast("B")


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
            ThreadPoolExecutor(1, thread_name_prefix=f"dsplan-nvme-{task}") for task in ("read", "write")
        )

    def adopt(self, bucket: Bucket) -> None:
        """Move a bucket's master to the file, unless it is the weights themselves, which are needed in memory."""
        shelf = self._shelves[bucket] = Shelf(self._file)
        if bucket.master is not bucket.part and bucket.master.numel():
            shelf.add({_MASTER: bucket.master})
            bucket.master = shelf.mapped(_MASTER)

    def visited(self, buckets: Sequence[Bucket], pieces: Pieces, optimizer: torch.optim.Optimizer) -> Iterator[Bucket]:
        """Yield the buckets one after the other, each with its states in memory until the next one is asked for."""
        coming: deque[Future[torch.Tensor]] = deque()
        leaving: deque[Future[None]] = deque()
        shelves = [self._shelves[bucket] for bucket in buckets]

        def ask(number: int, *, leave: int) -> None:
            if number < len(shelves):
                while len(leaving) > leave:
                    leaving.popleft().result()
                coming.append(self._reader.submit(shelves[number].read, shelves[number].room()))

        try:
            for number, bucket in enumerate(buckets):
                if not coming:
                    ask(number, leave=0)
                memory = coming.popleft().result()
                if self._buffers > 1:
                    ask(number + 1, leave=max(self._buffers - 2, 0))
                states = _States(bucket, shelves[number], pieces, optimizer)
                states.bring(memory)
                yield bucket
                states.put_back(memory)
                leaving.append(self._writer.submit(shelves[number].write, memory))
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
        """Let pieces and states be views of the file, which is about to have `memory`; new states go there at once."""
        if self._shelf.holds(_MASTER):
            self._use_master(self._shelf.mapped(_MASTER))
        new: dict[Hashable, torch.Tensor] = {}
        for key, _, value in self._each():
            if not self._shelf.holds(key, value):
                new[key] = value
            elif value.data_ptr() != (view := self._shelf.view(key, memory)).data_ptr():
                view.copy_(value)
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
        """Return key, state and value of every tensor worth a place in the file."""
        tensors = []
        for number, slot in enumerate(self._bucket.slots):
            state = self._optimizer.state.get(self._pieces.of[slot.parameter], {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= _SMALLEST:
                    tensors.append(((number, name), state, value))
        return tensors
