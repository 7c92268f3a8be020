"""How fast this device's memory, and the link to the host, move bytes."""

from __future__ import annotations

import torch

from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import median_seconds


def memory_rate(device: torch.device, size_bytes: int, *, budget_seconds: float = 0.2) -> Rate:
    """Bytes/s of a copy within the device's memory; each byte counts twice, once read and once written."""
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, budget_seconds=budget_seconds)
    return Rate(operation="memory", value=2 * size_bytes / seconds, unit="bytes/s", size=size_bytes)


def host_link_rate(device: torch.device, size_bytes: int, *, budget_seconds: float = 0.2) -> Rate:
    """Bytes/s from pinned host memory to the device."""
    source = torch.ones(size_bytes // 4, dtype=torch.float32).pin_memory()
    target = torch.empty(size_bytes // 4, dtype=torch.float32, device=device)
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True), device, budget_seconds=budget_seconds)
    return Rate(operation="host_to_device", value=size_bytes / seconds, unit="bytes/s", size=size_bytes)
