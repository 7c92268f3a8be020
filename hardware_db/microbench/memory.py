"""Rates of this device's memory and of the link to the host, and the time of the smallest kernel."""

from __future__ import annotations

import os
import tempfile
from typing import IO

import torch
from torch.nn.functional import gelu

from hardware_db.errors import DsplanError
from hardware_db.files import data_dir
from hardware_db.microbench.grid import Point, Rate
from hardware_db.microbench.timer import DTYPES, Budget, time_calls


def copy(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of a copy of `size` bytes within the device's memory; each byte counts twice, read and written."""
    source = torch.ones(point.size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def clone(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of a copy of `size` bytes into memory just allocated, read and written.

    On a CPU the operating system hands out large memory page by page as it is first touched.
    """
    source = torch.ones(point.size // 4, dtype=torch.float32, device=device)
    timing = time_calls(source.clone, device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def elementwise(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of GELU over a tensor of `size` bytes, read and written.

    What activations cost where exponentials are slower than copies, as on CPUs.
    """
    dtype = DTYPES[point.dtype]
    source = torch.randn(point.size // dtype.itemsize, device=device).to(dtype)
    timing = time_calls(lambda: gelu(source), device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def dropout(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of dropout over a tensor of `size` bytes, read and written: a CPU draws its random numbers one by one."""
    source = torch.ones(point.size // 4, dtype=torch.float32, device=device)
    timing = time_calls(lambda: torch.nn.functional.dropout(source, 0.1), device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def launch(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Seconds from one kernel to the next where there is nothing to compute: what the host takes to launch it."""
    number = torch.zeros(1, device=device)
    timing = time_calls(lambda: number.add_(1), device, budget)
    return Rate(point=point, value=timing.seconds, unit="s", repeats=timing.repeats, spread=timing.spread)


def host_link(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s between host memory and the device, one way; pageable host memory where the operation's name says so."""
    host = torch.ones(point.size // 4, dtype=torch.float32)
    if not point.operation.endswith("pageable"):
        host = host.pin_memory()
    on_device = torch.empty(host.shape, dtype=host.dtype, device=device)
    source, target = (host, on_device) if point.operation.startswith("host_to_device") else (on_device, host)
    timing = time_calls(lambda: target.copy_(source, non_blocking=True), device, budget)
    value = point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


# How fast the host's processors apply AdamW, which is what optimizer offload waits for.


def cpu_adamw(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Parameters/s of torch's AdamW over fp32 parameters of `size` bytes in host memory, in this process's threads.

    `cpu_adamw` is torch's default on a CPU, a loop over tensor operations; `cpu_adamw_fused` its single kernel.
    """
    weight = torch.nn.Parameter(torch.zeros(point.size // 4))
    weight.grad = torch.full_like(weight, 1e-3)
    fused = True if point.operation.endswith("fused") else None
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=fused)
    timing = time_calls(optimizer.step, device, budget)
    value = weight.numel() / timing.seconds
    return Rate(point=point, value=value, unit="parameters/s", repeats=timing.repeats, spread=timing.spread)


# How fast the disk that dsplan keeps its data on writes and reads, which is what NVMe offload waits for.


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
