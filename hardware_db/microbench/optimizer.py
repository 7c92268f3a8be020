"""How fast the host's processors apply AdamW, which is what optimizer offload waits for."""

from __future__ import annotations

import torch

from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import median_seconds


def cpu_adamw_rate(parameters: int, *, budget_seconds: float = 0.3) -> Rate:
    """Parameters/s of torch's AdamW over fp32 parameters in host memory, in this process's threads."""
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    seconds = median_seconds(optimizer.step, torch.device("cpu"), budget_seconds=budget_seconds)
    return Rate(
        operation="cpu_adamw", value=parameters / seconds, unit="parameters/s", dtype="fp32", size=4 * parameters
    )
