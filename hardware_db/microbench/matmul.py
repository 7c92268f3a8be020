"""How fast this device multiplies square matrices."""

from __future__ import annotations

import torch

from hardware_db.microbench.rate import Rate
from hardware_db.microbench.timer import median_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul_rate(device: torch.device, dtype: str, edge: int, *, budget_seconds: float = 0.3) -> Rate:
    """FLOP/s of an `edge` x `edge` product in `dtype` (fp32, bf16, fp16); 2 edge^3 operations each."""
    left = torch.randn(edge, edge, device=device).to(DTYPES[dtype])
    right = torch.randn(edge, edge, device=device).to(DTYPES[dtype])
    out = torch.empty_like(left)
    seconds = median_seconds(lambda: torch.mm(left, right, out=out), device, budget_seconds=budget_seconds)
    return Rate(operation="matmul", value=2 * edge**3 / seconds, unit="FLOP/s", dtype=dtype, size=edge)
