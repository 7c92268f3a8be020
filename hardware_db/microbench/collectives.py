"""How fast the ranks of the live process group reduce together. Every rank must call these, in the same order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import median_seconds

# A fixed count on every rank: a budget would let ranks disagree on the number of collectives and hang.
_NO_EXTRA_TIME = 0.0


def all_reduce_rate(device: torch.device, size_bytes: int) -> Rate:
    """Bus bandwidth of all-reduce, bytes/s: 2 (n - 1) / n x size / time, as nccl-tests defines it."""
    ranks = dist.get_world_size()
    seconds = _all_reduce_seconds(device, size_bytes)
    bus_bytes_per_s = 2 * (ranks - 1) / ranks * size_bytes / seconds
    return Rate(
        operation="all_reduce", value=bus_bytes_per_s, unit="bytes/s", dtype="fp32", size=size_bytes, ranks=ranks
    )


def all_reduce_latency(device: torch.device) -> Rate:
    """Seconds of an all-reduce of 4 bytes."""
    seconds = _all_reduce_seconds(device, 4)
    return Rate(
        operation="all_reduce_latency", value=seconds, unit="s", dtype="fp32", size=4, ranks=dist.get_world_size()
    )


def _all_reduce_seconds(device: torch.device, size_bytes: int) -> float:
    """Median over three repeats, then the slowest rank's: that is how long everybody waits."""
    tensor = torch.zeros(max(1, size_bytes // 4), device=device)
    dist.barrier()
    seconds = median_seconds(lambda: dist.all_reduce(tensor), device, budget_seconds=_NO_EXTRA_TIME)
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())
