"""A file without a name that tensors are moved to: it is gone with its process, however that ends."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hardware_db.units import format_bytes
from strategies.errors import CannotRun
from strategies.reachable import MAPPED_FILES

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
        """Where `size` more bytes may be written; the disk holds them for us from now on, so that it cannot be full
        later, when they are."""
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
        """Bytes of the file as a tensor, [size]."""
        view = torch.frombuffer(mmap.mmap(self._file.fileno(), size, offset=start), dtype=torch.uint8)
        MAPPED_FILES[view.untyped_storage().data_ptr()] = view
        return view

    def read(self, start: int, memory: torch.Tensor) -> None:
        """Fill `memory` from the file."""
        view, done = _bytes_of(memory), 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done:]], start + done)

    def write(self, start: int, memory: torch.Tensor) -> None:
        """Write `memory` to the file."""
        view, done = _bytes_of(memory), 0
        while done < len(view):
            done += os.pwritev(self._file.fileno(), [view[done:]], start + done)


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
        """The tensor, out of its extent's bytes."""
        size = self.like.numel() * self.like.element_size()
        return memory[self.begin : self.begin + size].view(self.like.dtype).view(self.like.shape)


class Shelf:
    """Tensors that are read and written together, by keys."""

    def __init__(self, file: SwapFile) -> None:
        self._file, self._bytes = file, 0
        self._extents: list[_Extent] = []
        self._regions: dict[Hashable, _Region] = {}

    def holds(self, key: Hashable, like: torch.Tensor | None = None) -> bool:
        """Whether there is such a tensor, of the dtype and shape of `like`."""
        found = self._regions.get(key)
        return found is not None and (like is None or (found.like.dtype, found.like.shape) == (like.dtype, like.shape))

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
        """A tensor as the file has it."""
        region = self._regions[key]
        return region.of(region.extent.mapped)

    def view(self, key: Hashable, memory: torch.Tensor) -> torch.Tensor:
        """A tensor as `memory`, which was read, has it."""
        region = self._regions[key]
        return region.of(memory[region.extent.begin :])

    def room(self) -> torch.Tensor:
        """Memory for all bytes of the shelf."""
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
