"""Outputs of single kernels whose fake form differs from the real one."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from strategies.torch_compat.dispatch import TorchDispatchMode

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default if hasattr(_aten, "_grouped_mm") else None  # torch 2.8 has it first
_WITH_STATISTICS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})


def cuda_outputs() -> AbstractContextManager[object]:
    """Norms keep fp32 statistics, as on CUDA; grouped products of every dtype have an output."""
    make: Any = _Outputs
    mode: AbstractContextManager[object] = make(fp32_statistics=True)
    return mode


def cpu_outputs() -> AbstractContextManager[object]:
    """Give grouped products of every dtype an output: torch's fake kernel knows bf16 only."""
    make: Any = _Outputs
    mode: AbstractContextManager[object] = make(fp32_statistics=False)
    return mode


class _Outputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's wrapper costs as much as the operation

    def __init__(self, *, fp32_statistics: bool) -> None:
        initialize: Any = super().__init__
        initialize()
        self._fp32_statistics = fp32_statistics

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED:
            return _grouped_product(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self._fp32_statistics and func in _WITH_STATISTICS:
            output, *statistics = result
            return (output, *(part.to(torch.float32) for part in statistics))
        return result


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *others: Any, **options: Any
) -> torch.Tensor:
    """Rows of each group times its matrix; where both are matrices, one product per group of `offs`."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups = [offs.shape[0]] if left.dim() == right.dim() == 2 and offs is not None else []
    if left.dim() == 3 and right.dim() == 3:
        groups = [left.shape[0]]
    return left.new_empty(*groups, rows, columns, dtype=options.get("out_dtype") or left.dtype)


# What CUDA kernels of torch allocate and free inside one operation, as far as it grows with the batch.


_aten_ops = torch.ops.aten
_FP32 = 4
Allocation: TypeAlias = tuple[tuple[int, ...], int]
"""Shape and bytes per element."""


def scratch_sizes(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each tensor that is alive inside the operation beside its arguments and results."""
    return [math.prod(shape) * size for shape, size in scratch(func, args)]


def scratch(func: Any, args: tuple[Any, ...]) -> list[Allocation]:
    """Return their shapes and the bytes of an item."""
    if func is _aten_ops._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(*args[:5])
    if func is _aten_ops._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward(args[1], args[5])
    return []


def _flash_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
) -> list[Allocation]:
    """Return the queries' gradient in fp32, one figure per row, and gradients of keys and values of ungrouped heads.

    The kernel wants [batch, length, heads, width] and copies what is laid out otherwise.
    """
    batch, heads, length, width = query.shape
    rows = (batch, heads, _up(length, 128))
    allocations: list[Allocation] = [((*rows, _up(width, 32 if width <= 128 else 64)), _FP32), (rows, _FP32)]
    if key.size(1) != heads:
        allocations += [((batch, heads, key.size(2), width), query.element_size())] * 2
    copied = (tensor for tensor in (gradient, output) if not tensor.transpose(1, 2).is_contiguous())
    return allocations + [(tuple(tensor.shape), tensor.element_size()) for tensor in copied]


def _efficient_backward(query: torch.Tensor, output: torch.Tensor) -> list[Allocation]:
    """Return the queries' gradient in fp32; of fp32 inputs also their product with the output's gradient."""
    batch, heads, length, width = query.shape
    allocations: list[Allocation] = [((batch, heads, _up(length, 64), _up(width, 32)), _FP32)]
    return allocations + ([(tuple(output.shape), _FP32)] if query.dtype == torch.float32 else [])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
