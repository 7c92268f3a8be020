"""Outputs of single kernels whose fake form differs from the real one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default if hasattr(_aten, "_grouped_mm") else None  # torch 2.8 has it first
_WITH_STATISTICS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})


def cuda_outputs() -> AbstractContextManager[object]:
    """Norms keep fp32 statistics, as on CUDA; grouped products of every dtype have an output."""
    make: Any = _Outputs
    made: AbstractContextManager[object] = make(fp32_statistics=True)
    return made


def cpu_outputs() -> AbstractContextManager[object]:
    """Grouped products of every dtype have an output: torch's fake kernel knows bf16 only."""
    make: Any = _Outputs
    made: AbstractContextManager[object] = make(fp32_statistics=False)
    return made


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
