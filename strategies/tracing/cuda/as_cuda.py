"""Fake tensors on the CPU that behave as CUDA tensors do, as far as memory can tell.

A CPU build of torch cannot run autograd on fake CUDA tensors, so a trace runs on fake CPU tensors. What differs there
is replaced while `as_cuda` is active, in torch's dispatcher: attention is called with the kernels CUDA chooses,
autocast follows CUDA's lists, dropout keeps a mask of one byte per element, root-mean-square norms are one kernel, and
code that asks whether autocast is on for `cuda` hears what is true of `cpu`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from strategies.tracing.cuda import autocast as cuda_autocast
from strategies.tracing.cuda.attention import Call, attention
from strategies.tracing.cuda.kernels import cuda_outputs

DEFAULT_CAPABILITY = (8, 0)
"""Ampere: the oldest on which every kernel of torch's attention runs in bf16."""


@contextlib.contextmanager
def as_cuda(capability: tuple[int, int] = DEFAULT_CAPABILITY) -> Iterator[None]:
    """Make fake CPU tensors make the storages that a CUDA device of that compute capability makes.

    Enter it inside a `FakeTensorMode` and outside of what observes operations. It changes torch's dispatch of CPU
    tensors in the whole process, so nothing else may compute meanwhile.
    """
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that a kernel is replaced
            cuda_autocast.register(library)
            library.impl("scaled_dot_product_attention", _attention_on(capability), "AutogradCPU")
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
            library.impl("softmax.int", _half_to_float(torch.ops.aten._softmax.default), "AutogradCPU")
            library.impl("log_softmax.int", _half_to_float(torch.ops.aten._log_softmax.default), "AutogradCPU")
        with _autocast_queries_answered(), cuda_outputs():
            yield
    finally:
        library._destroy()


def _attention_on(capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        call = Call(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            causal=is_causal,
            scale=options.get("scale"),
            grouped=options.get("enable_gqa", False),
        )
        return attention(call, capability)

    return scaled_dot_product_attention


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros_like(input)
    results: Any = torch.ops.aten.native_dropout(input, p, True)
    output: torch.Tensor = results[0]
    return output


def _half_to_float(operator: Any) -> Callable[..., torch.Tensor]:
    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        in_one = input.dtype == torch.float16 and dtype == torch.float32
        values = input if in_one or dtype is None else input.to(dtype)
        result: torch.Tensor = operator(values, dim, in_one)
        return result

    return kernel


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    result: torch.Tensor = _RmsNorm.apply(input, len(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    """The storages of CUDA's fused kernel: the output and one fp32 figure per row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        rows = input.shape[: input.dim() - dims]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        needed = weight is not None and ctx.needs_input_grad[2]
        return torch.empty_like(input), None, torch.empty_like(weight) if needed else None


@contextlib.contextmanager
def _autocast_queries_answered() -> Iterator[None]:
    """Autocast for `cuda` means autocast for `cpu`, where the tensors are; asked of no device, it is CUDA's."""
    autocast: Any = torch.amp.autocast_mode.autocast
    start, enabled, dtype = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def initialize(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, _here(device_type), *args, **kwargs)

    module: Any = torch
    autocast.__init__ = initialize
    module.is_autocast_enabled = lambda device_type="cuda": enabled(_here(device_type))
    module.get_autocast_dtype = lambda device_type: dtype(_here(device_type))
    try:
        yield
    finally:
        autocast.__init__, module.is_autocast_enabled, module.get_autocast_dtype = start, enabled, dtype


def _here(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type
