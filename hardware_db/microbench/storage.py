"""How fast the disk that dsplan keeps its data on writes and reads, which is what NVMe offload waits for."""

from __future__ import annotations

import os
import tempfile
from typing import IO

import torch

from hardware_db.errors import DsplanError
from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import Budget, time_calls
from hardware_db.paths import data_dir

_CHUNK_BYTES = 8 << 20
_MOST_OF_FREE = 0.1


def disk(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of writing a file of `size` bytes until it is on the disk, or of reading one that no cache holds.

    The file has no name, so that nothing of it is left however this process ends.

    Raises:
        DsplanError: the file would take more than a tenth of what is free.
    """
    _check_room(point)
    with tempfile.TemporaryFile(dir=data_dir(), buffering=0) as file:
        _write(file, point.size)
        use = _write if point.operation == "disk_write" else _read
        timing = time_calls(lambda: use(file, point.size), device, budget)
    value = point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def _check_room(point: Point) -> None:
    where = data_dir()
    where.mkdir(parents=True, exist_ok=True)
    state = os.statvfs(where)
    if point.size * point.ranks > _MOST_OF_FREE * state.f_bavail * state.f_frsize:
        raise DsplanError(f"{where}: too little room to time a disk with {point.size >> 20} MiB; free some, or move it")


def _write(file: IO[bytes], size: int) -> None:
    chunk = memoryview(bytearray(os.urandom(1 << 20) * (_CHUNK_BYTES >> 20)))
    file.seek(0)
    for start in range(0, size, _CHUNK_BYTES):
        file.write(chunk[: size - start])
    os.fsync(file.fileno())


def _read(file: IO[bytes], size: int) -> None:
    # What was written is on the disk; the kernel now forgets its copy.
    os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    buffer = bytearray(_CHUNK_BYTES)
    while file.readinto(buffer):  # type: ignore[attr-defined]
        pass
