"""How fast this device's memory, and the link to the host, move bytes; and how long the smallest kernel takes."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu

from hardware_db.microbench.dtypes import DTYPES
from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import Budget, time_calls


def copy(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of a copy of `size` bytes within the device's memory; each byte counts twice, read and written."""
    source = torch.ones(point.size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    timing = time_calls(lambda: target.copy_(source), device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def clone(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of a copy of `size` bytes into memory just allocated, read and written: on a CPU the operating system
    hands out large memory page by page as it is first touched."""
    source = torch.ones(point.size // 4, dtype=torch.float32, device=device)
    timing = time_calls(source.clone, device, budget)
    value = 2 * point.size / timing.seconds
    return Rate(point=point, value=value, unit="bytes/s", repeats=timing.repeats, spread=timing.spread)


def elementwise(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Bytes/s of GELU over a tensor of `size` bytes, read and written: what activations cost where exponentials are
    slower than copies, as on CPUs."""
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
