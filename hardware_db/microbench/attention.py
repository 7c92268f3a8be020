"""How fast this device runs torch's fused causal attention."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from hardware_db.microbench.rate import DTYPES, Point, Rate
from hardware_db.microbench.timer import Budget, time_calls

_BACKWARD_OVER_FORWARD = 2.5  # five products for the forward's two (FlashAttention-2, arXiv 2307.08691, section 4.1)


def forward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of attention for shape (batch, heads, sequence, head width): 4 b h s s d, the masked half counted too."""
    inputs = _inputs(point, device)
    timing = time_calls(lambda: scaled_dot_product_attention(*inputs, is_causal=True), device, budget)
    value = _operations(point) / timing.seconds
    return Rate(point=point, value=value, unit="FLOP/s", repeats=timing.repeats, spread=timing.spread)


def backward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of its backward pass, counted as 2.5 times the forward."""
    inputs = _inputs(point, device)
    out = scaled_dot_product_attention(*inputs, is_causal=True)
    gradient = torch.ones_like(out)
    timing = time_calls(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True), device, budget)
    value = _BACKWARD_OVER_FORWARD * _operations(point) / timing.seconds
    return Rate(point=point, value=value, unit="FLOP/s", repeats=timing.repeats, spread=timing.spread)


def _inputs(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (
        torch.randn(point.shape, device=device).to(DTYPES[point.dtype]).requires_grad_() for _ in range(3)
    )
    return query, key, value


def _operations(point: Point) -> int:
    batch, heads, length, width = point.shape
    return 4 * batch * heads * length * length * width
