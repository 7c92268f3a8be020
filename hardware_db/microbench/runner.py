"""Runs points: by name to the function that measures them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module

import torch

from hardware_db.errors import DsplanError
from hardware_db.microbench.grid import CPU, GPU, Point, Rate, Refusal, quick_points
from hardware_db.microbench.timer import Budget, least, ranks_at_work

_COLLECTIVE = "hardware_db.microbench.collectives:bus_bandwidth"
_LATENCY = "hardware_db.microbench.collectives:latency"
_HOST_LINK = "hardware_db.microbench.memory:host_link"
_ADAMW = "hardware_db.microbench.memory:cpu_adamw"
_DISK = "hardware_db.microbench.memory:disk"
MEASURES: Mapping[str, str] = {
    "matmul": "hardware_db.microbench.compute:matmul",
    "matmul_backward": "hardware_db.microbench.compute:matmul_backward",
    "attention": "hardware_db.microbench.compute:attention",
    "attention_backward": "hardware_db.microbench.compute:attention_backward",
    "memory": "hardware_db.microbench.memory:copy",
    "clone": "hardware_db.microbench.memory:clone",
    "elementwise": "hardware_db.microbench.memory:elementwise",
    "dropout": "hardware_db.microbench.memory:dropout",
    "launch": "hardware_db.microbench.memory:launch",
    "host_to_device": _HOST_LINK,
    "device_to_host": _HOST_LINK,
    "host_to_device_pageable": _HOST_LINK,
    "device_to_host_pageable": _HOST_LINK,
    "barrier": _LATENCY,
    "all_reduce_latency": _LATENCY,
    "all_reduce": _COLLECTIVE,
    "all_gather": _COLLECTIVE,
    "reduce_scatter": _COLLECTIVE,
    "all_to_all": _COLLECTIVE,
    "broadcast": _COLLECTIVE,
    "reduce": _COLLECTIVE,
    "gather": _COLLECTIVE,
    "scatter": _COLLECTIVE,
    "point_to_point": _COLLECTIVE,
    "cpu_adamw": _ADAMW,
    "cpu_adamw_fused": _ADAMW,
    "disk_write": _DISK,
    "disk_read": _DISK,
}


def measure(point: Point, device: torch.device, budget: Budget) -> Rate:
    """Measure one point on this rank's device; all ranks of the live process group call this together."""
    module, _, name = MEASURES[point.operation].partition(":")
    rate: Rate = getattr(import_module(module), name)(point, device, budget)
    return rate


def measure_on_rank(point: Point, threads: int) -> Rate | Refusal:
    """Measure one point as a rank of a pool, which computes in `threads` threads; what torch refuses is an answer."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(threads)
    try:
        return measure(point, device, Budget())
    except (DsplanError, RuntimeError, NotImplementedError) as problem:
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        return Refusal(reason=lines[0][:200])


# The rates that a first plan on a machine needs, measured by the ranks that are about to train.


def wanted_points(device: torch.device) -> tuple[Point, ...]:
    """Return what to measure with as many ranks as the live process group has."""
    return quick_points(GPU if device.type == "cuda" else CPU, ranks_at_work())


def quick_rates(points: Iterable[Point], device: torch.device) -> tuple[Rate, ...]:
    """Measure the points.

    All ranks call this at the same time, so that what they share (cores, memory bus) is shared as in training. Points
    for which a rank's GPU has no room are left out: what trains next may need nearly all of it. The GPU keeps nothing.
    """
    if device.type != "cuda":
        return tuple(measure(point, device, Budget()) for point in points)
    rates = tuple(measure(point, device, Budget()) for point in points if _has_room(point, device))
    torch.cuda.empty_cache()
    return rates


def _has_room(point: Point, device: torch.device) -> bool:
    """Return whether every rank's GPU has the memory that a point takes."""
    torch.cuda.empty_cache()  # of the points before, which the GPU counts as taken
    free, _ = torch.cuda.mem_get_info(device)
    rows, inner, columns = point.shape or (0, 0, 0)
    operands = rows * inner + inner * columns + rows * columns
    return least(free, device) >= _TENSORS * point.size + _BYTES_PER_OPERAND * operands + _SPARE


_TENSORS = 3  # of the point's size, which a collective holds
_BYTES_PER_OPERAND = 6  # drawn in fp32, and a copy in 16 bits
_SPARE = 64 << 20  # the workspace of cuBLAS and the ends of segments
