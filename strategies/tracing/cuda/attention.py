"""Kernels that CUDA's scaled_dot_product_attention takes, and calls of them that make the same tensors.

The rules are torch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`. Flash and cuDNN keep the same tensors
(queries, keys, values, output and one fp32 log-sum-exp per row), so that cuDNN is not told apart.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

_aten = torch.ops.aten
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256
Kernel = Literal["flash", "efficient", "math"]
# Grouped keys in the memory-efficient kernel came after 2.13 (pytorch#191085).
_EFFICIENT_TAKES_GROUPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of scaled_dot_product_attention; tensors are [batch, heads, length, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the widths of queries, keys and values."""
        query, key, value = (tensor.size(-1) for tensor in self.tensors)
        return query, key, value


def kernel_for(call: Call, capability: tuple[int, int]) -> Kernel:
    """Return the kernel torch chooses on a device of that compute capability."""
    if any(tensor.dim() != 4 for tensor in call.tensors) or 0 in (call.query.size(2), call.key.size(2)):
        return "math"
    if _flash_takes(call, capability):
        return "flash"
    return "efficient" if _efficient_takes(call, capability) else "math"


def attention(call: Call, capability: tuple[int, int]) -> torch.Tensor:
    """Return the output [batch, heads, length, value width], made by the kernel that CUDA would choose."""
    kernel = kernel_for(call, capability)
    if kernel == "flash":
        return _flash(call)
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=call.query.dtype))
    if kernel == "efficient":
        return _efficient(call, mask)
    return _math(call, mask)


def _flash_takes(call: Call, capability: tuple[int, int]) -> bool:
    width = call.widths[0]
    narrow_hardware = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        call.mask is None
        and capability >= (8, 0)
        and call.query.dtype in _SIXTEEN_BITS
        and len(set(call.widths)) == 1
        and width <= _FLASH_WIDTH
        and not (narrow_hardware and 192 < width <= 224)
        and not (narrow_hardware and width > 224 and call.dropout > 0)
        and not (call.causal and call.query.size(2) != call.key.size(2))
        and _heads_match(call, takes_groups=True)
        and _rows_contiguous(call)
    )


def _efficient_takes(call: Call, capability: tuple[int, int]) -> bool:
    half = call.query.dtype in _SIXTEEN_BITS
    if call.query.dtype not in (torch.float32, torch.float16) and not (half and capability >= (8, 0)):
        return False
    tensor_cores = capability >= (8, 0) or (capability[0] == 7 and half)
    alignment = max(4 if capability >= (8, 0) else 1, (8 if half else 4) if tensor_cores else 1)
    query, key, value = call.widths
    return (
        query == key
        and query % alignment == 0
        and value % alignment == 0
        and _heads_match(call, takes_groups=_EFFICIENT_TAKES_GROUPS)
        and _rows_contiguous(call)
    )


def _heads_match(call: Call, *, takes_groups: bool) -> bool:
    if len({tensor.size(0) for tensor in call.tensors}) > 1:
        return False
    query, key, value = (tensor.size(1) for tensor in call.tensors)
    if call.grouped and takes_groups:
        return key == value and query % key == 0
    return query == key == value


def _rows_contiguous(call: Call) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in call.tensors)


def _flash(call: Call) -> torch.Tensor:
    width = call.query.size(-1)
    scale = call.scale if call.scale is not None else 1 / math.sqrt(width)
    missing = -width % 8
    query, key, value = (
        torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor for tensor in call.tensors
    )
    results: Any = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.causal, False, scale=scale
    )
    output: torch.Tensor = results[0]
    return output[..., :width] if missing else output


def _padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _efficient(call: Call, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None:
        if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
            length = mask.size(-1)
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*call.query.shape[:3], call.key.size(2))
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    results: Any = _aten._scaled_dot_product_efficient_attention(
        *call.tensors, mask, needs_gradient, call.dropout, call.causal, scale=call.scale
    )
    output: torch.Tensor = results[0]
    return output


def _math(call: Call, mask: torch.Tensor | None) -> torch.Tensor:
    results: Any = _aten._scaled_dot_product_attention_math(
        *call.tensors, mask, call.dropout, call.causal, None, scale=call.scale, enable_gqa=call.grouped
    )
    output: torch.Tensor = results[0]
    return output


# Local attention of flash attention, which takes the window as a number and not as a mask.


@contextlib.contextmanager
def windows_without_masks() -> Iterator[None]:
    """Have transformers make no masks for torch's attention function: the tensors of a step with flash attention."""
    module = _masks_of_transformers()
    if module is None:
        yield
        return
    masks = module.ALL_MASK_ATTENTION_FUNCTIONS
    masks["sdpa"] = _no_mask
    try:
        yield
    finally:
        del masks["sdpa"]  # the library's own shows again


def _masks_of_transformers() -> Any:
    """Return the module of its masks, or None where no model of its has been imported: to import it takes seconds."""
    return sys.modules.get("transformers.masking_utils")


def _no_mask(*_arguments: Any, **_named: Any) -> None:
    return None


@contextlib.contextmanager
def unpadded() -> Iterator[None]:
    """Let transformers believe that no sample is padded and none packed, while it runs on fake tensors."""
    masks = _masks_of_transformers()
    if masks is None:
        yield
        return
    with contextlib.ExitStack() as restored:
        _replace(masks, "find_packed_sequence_indices", lambda _: _not_packed, restored)
        for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
            _replace(masks, name, _without_padding, restored)
        yield


def _not_packed(*_positions: Any, **_named: Any) -> None:
    return None


def _without_padding(skips: Callable[..., Any]) -> Callable[..., Any]:
    def skips_unpadded(padding_mask: Any = None, *rest: Any, **named: Any) -> Any:
        return skips(None, *rest, **named)

    return skips_unpadded


def _replace(module: Any, name: str, changed: Callable[[Any], Any], restored: contextlib.ExitStack) -> None:
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, changed(original))
        restored.callback(setattr, module, name, original)
