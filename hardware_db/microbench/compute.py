"""Rates of a transformer's products with its weights, and of torch's fused causal attention."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hardware_db.microbench.grid import Point, Rate
from hardware_db.microbench.timer import DTYPES, Budget, time_calls


def matmul(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of `x[m, k] @ w[n, k].T` for shape (m, k, n), as `nn.Linear` runs it: 2 m k n operations."""
    rows, weight = _matmul_operands(point, device)
    timing = time_calls(lambda: linear(rows, weight), device, budget)
    return _matmul_rate(point, timing.seconds, timing.repeats, timing.spread)


def matmul_backward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of the two products of its backward pass, for the input and for the weight: 4 m k n operations."""
    rows, weight = _matmul_operands(point, device)
    gradient = torch.randn(rows.shape[0], weight.shape[0], device=device).to(rows.dtype)

    def both() -> None:
        gradient.mm(weight)
        gradient.t().mm(rows)

    timing = time_calls(both, device, budget)
    return _matmul_rate(point, timing.seconds / 2, timing.repeats, timing.spread)


def _matmul_operands(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    m, k, n = point.shape
    dtype = DTYPES[point.dtype]
    return torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)


def _matmul_rate(point: Point, seconds: float, repeats: int, spread: float) -> Rate:
    m, k, n = point.shape
    return Rate(point=point, value=2 * m * k * n / seconds, unit="FLOP/s", repeats=repeats, spread=spread)


_BACKWARD_OVER_FORWARD = 2.5  # five products for the forward's two (FlashAttention-2, arXiv 2307.08691, section 4.1)


def attention(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of attention for shape (batch, heads, sequence, head width): 4 b h s s d, the masked half counted too."""
    inputs = _attention_inputs(point, device)
    timing = time_calls(lambda: scaled_dot_product_attention(*inputs, is_causal=True), device, budget)
    value = _attention_operations(point) / timing.seconds
    return Rate(point=point, value=value, unit="FLOP/s", repeats=timing.repeats, spread=timing.spread)


def attention_backward(point: Point, device: torch.device, budget: Budget) -> Rate:
    """FLOP/s of its backward pass, counted as 2.5 times the forward."""
    inputs = _attention_inputs(point, device)
    out = scaled_dot_product_attention(*inputs, is_causal=True)
    gradient = torch.ones_like(out)
    timing = time_calls(lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True), device, budget)
    value = _BACKWARD_OVER_FORWARD * _attention_operations(point) / timing.seconds
    return Rate(point=point, value=value, unit="FLOP/s", repeats=timing.repeats, spread=timing.spread)


def _attention_inputs(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (
        torch.randn(point.shape, device=device).to(DTYPES[point.dtype]).requires_grad_() for _ in range(3)
    )
    return query, key, value


def _attention_operations(point: Point) -> int:
    batch, heads, length, width = point.shape
    return 4 * batch * heads * length * length * width
