"""How fast this device runs the weight products of a transformer."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from hardware_db.microbench.rate import DTYPES, Point, Rate
from hardware_db.microbench.timer import Budget, time_calls


def forward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of `x[m, k] @ w[n, k].T` for shape (m, k, n), as `nn.Linear` runs it: 2 m k n operations."""
    rows, weight = _operands(point, device)
    timing = time_calls(lambda: linear(rows, weight), device, budget)
    return _rate(point, timing.seconds, timing.repeats, timing.spread)


def backward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of the two products of its backward pass, for the input and for the weight: 4 m k n operations."""
    rows, weight = _operands(point, device)
    gradient = torch.randn(rows.shape[0], weight.shape[0], device=device).to(rows.dtype)

    def both() -> None:
        gradient.mm(weight)
        gradient.t().mm(rows)

    timing = time_calls(both, device, budget)
    return _rate(point, timing.seconds / 2, timing.repeats, timing.spread)


def _operands(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    m, k, n = point.shape
    dtype = DTYPES[point.dtype]
    return torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)


def _rate(point: Point, seconds: float, repeats: int, spread: float) -> Rate:
    m, k, n = point.shape
    return Rate(point=point, value=2 * m * k * n / seconds, unit="FLOP/s", repeats=repeats, spread=spread)
