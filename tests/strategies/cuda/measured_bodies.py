"""Functions that ranks run in `test_measured.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hardware_db.microbench.grid import Point
from hardware_db.microbench.runner import quick_rates
from strategies.telemetry.machine import GpuReader
from strategies.telemetry.monitor import gpu_uuid

MIB = 1 << 20


def measured_beside(left_mib: int) -> dict[str, Any]:
    """Measure two points beside a tensor that leaves rank 1's card so much; what is measured, and what cards keep."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    bytes_ = free - left_mib * MIB if dist.get_rank() == 1 else 0
    taken = torch.empty(bytes_, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_reserved(device)
    points = [Point(operation="memory", size=size * MIB, ranks=2) for size in (64, 2)]
    rates = quick_rates(points, device)
    kept = max(0, torch.cuda.memory_reserved(device) - before)  # garbage of earlier calls may go meanwhile
    del taken
    torch.cuda.empty_cache()
    return {"sizes": [rate.point.size // MIB for rate in rates], "kept": kept}


def gpu_figures(mib: int) -> tuple[int, dict[str, float]]:
    """Return what a rank has reserved of its card beside a tensor, and the figures of the card that a run samples."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(mib * MIB, dtype=torch.uint8, device=device)
    uuid = gpu_uuid(device)
    assert uuid is not None
    reader = GpuReader(uuid)
    figures = reader.read()
    reserved = torch.cuda.memory_reserved(device)
    del held
    return reserved, figures
