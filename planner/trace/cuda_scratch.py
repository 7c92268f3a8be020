"""What CUDA kernels of torch allocate and free inside one operation, as far as it grows with the batch.

Attention's backward is the one that matters. Sources: torch's `flash_attn/flash_api.cpp` (`mha_bwd`),
`attention_backward.cu`, and `mem_eff_attention/kernel_backward.h` (`workspace_size`). cuBLAS and cuDNN workspaces do
not grow with the batch and are not counted here.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

_aten = torch.ops.aten
_FP32 = 4
Allocation: TypeAlias = tuple[tuple[int, ...], int]
"""Shape and bytes per element."""


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes at most alive inside the operation beside its arguments and results; 0 for operations that need none."""
    return sum(math.prod(shape) * size for shape, size in scratch(func, args))


def scratch(func: Any, args: tuple[Any, ...]) -> list[Allocation]:
    """The same, one by one."""
    if func is _aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(*args[:5])
    if func is _aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward(args[1], args[5])
    return []


def _flash_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> list[Allocation]:
    """The queries' gradient in fp32, one figure per row, and for grouped heads the gradients of keys and values as if
    each query head had its own. The kernel wants [batch, length, heads, width] and copies what is laid out otherwise.
    """
    batch, heads, length, width = query.shape
    rows = (batch, heads, _up(length, 128))
    made: list[Allocation] = [((*rows, _up(width, 32 if width <= 128 else 64)), _FP32), (rows, _FP32)]
    if key.size(1) != heads:
        made += [((batch, heads, key.size(2), width), query.element_size())] * 2
    copied = (tensor for tensor in (gradient, output) if not tensor.transpose(1, 2).is_contiguous())
    return made + [(tuple(tensor.shape), tensor.element_size()) for tensor in copied]


def _efficient_backward(query: torch.Tensor, output: torch.Tensor) -> list[Allocation]:
    """The queries' gradient in fp32; fp32 inputs also have their product with the output's gradient made outside."""
    batch, heads, length, width = query.shape
    made: list[Allocation] = [((batch, heads, _up(length, 64), _up(width, 32)), _FP32)]
    return made + ([(tuple(output.shape), _FP32)] if query.dtype == torch.float32 else [])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
