"""Calls of fused attention that its tests make in a process with a card."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def drop_weights(dtype: str) -> tuple[float, float, float, int]:
    """Return sums of two outputs, of the values times their gradient, and bytes at most alive beside the arguments."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 256, 16, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
    value.requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = scaled_dot_product_attention(query, key, value, dropout_p=0.5, is_causal=True)
    output.float().sum().backward()
    assert value.grad is not None
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        other = scaled_dot_product_attention(query, key, value, dropout_p=0.5, is_causal=True)
        back = (value.grad.float() * value.float()).sum().item()
    return output.float().sum().item(), other.float().sum().item(), back, peak
