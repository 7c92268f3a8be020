"""CUDA's autocast rules for tensors on the CPU: which operations run in 16 bits, which in fp32, which promote.

The lists are those of torch's `ATen/autocast_mode.h`, which a test compares them with. A CPU build has rules of its own
for CPU tensors: softmax, norms, powers and sums stay in 16 bits there, so that other tensors are kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strategies.torch_compat.dispatch import has_kernel, operations, schema_of, without_cpu_autocast
from strategies.torch_compat.tensors import tree_map

_LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_FP32_OUTPUT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

LOWER_PRECISION = frozenset(_LOWER_PRECISION.split())
FP32 = frozenset(_FP32.split())
FP32_OUTPUT = frozenset(_FP32_OUTPUT.split())
"""Told to compute in fp32 by their `dtype` argument, unless the caller gave one: their input is not copied first."""
PROMOTE = frozenset(_PROMOTE.split())

_SAME_ON_CPU = frozenset({"conv1d.padding", "conv2d.padding", "conv3d.padding", "mkldnn_rnn_layer"})
_Kernel = Callable[..., Any]


def register(library: Any) -> None:
    """Replace the rules for CPU tensors as long as `library`, a `torch.library.Library` of aten kernels, lives."""
    # An older torch lacks some of the operations.
    known = {name.removeprefix("aten::") for name in operations() if name.startswith("aten::")}
    for names, rule in ((FP32, _in_fp32), (FP32_OUTPUT, _with_fp32_output), (PROMOTE, _promoted)):
        for name in names & known:
            library.impl(name, rule(_operator(name)), "AutocastCPU")
    with_rule = {name for name in known if has_kernel(f"aten::{name}", "AutocastCPU")}
    # torch caches the cast copies of weights in its own kernels, so those that exist stay.
    for name in (LOWER_PRECISION & known) - with_rule:
        library.impl(name, _in_lower_precision(_operator(name)), "AutocastCPU")
    for name in with_rule - LOWER_PRECISION - FP32 - FP32_OUTPUT - PROMOTE - _SAME_ON_CPU:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _eligible(value) else value, values)


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_fp32(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _in_lower_precision(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with without_cpu_autocast():
            return operator(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _with_fp32_output(operator: Any) -> _Kernel:
    place = [argument.name for argument in schema_of(operator).arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is None and _eligible(args[0]):
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with without_cpu_autocast():
            return operator(*args, **kwargs)

    return kernel


def _promoted(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        found: list[torch.dtype] = []
        tree_map(lambda value: found.append(value.dtype) if _eligible(value) else None, (args, kwargs))
        widest = torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cpu")
        with without_cpu_autocast():
            return operator(*_cast(args, widest), **_cast(kwargs, widest))

    return kernel
