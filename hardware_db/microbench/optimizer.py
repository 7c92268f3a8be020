"""How fast the host's processors apply AdamW, which is what optimizer offload waits for."""

from __future__ import annotations

import torch

from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import Budget, time_calls


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
