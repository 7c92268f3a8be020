"""What each precision of a plan means under the torch strategies.

`single` and `ddp` compute `bf16` and `fp16` under autocast over fp32 weights, as HF Trainer does. FSDP keeps fp32
shards, computes in 16 bits and reduces gradients in fp32. `bf16-pure` keeps everything, optimizer states too, in bf16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

_COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DTYPE = {**_COMPUTE_DTYPE, "bf16-pure": torch.bfloat16}
"""What ZeRO's weights compute in; fp32 is not in it."""


def cast_model(model: nn.Module, precision: str) -> nn.Module:
    """The model with its weights in the dtype they are kept in: bf16 for `bf16-pure`, else as they are."""
    return model.to(torch.bfloat16) if precision == "bf16-pure" else model


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for `bf16` and `fp16`, nothing for the others."""
    dtype = _COMPUTE_DTYPE.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def sharding_policy(precision: str, reduce: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """FSDP2's policy: 16-bit compute over fp32 shards, gradients reduced in `reduce`, fp32 unless it is given."""
    dtype = _COMPUTE_DTYPE.get(precision)
    if dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=reduce)
    return MixedPrecisionPolicy(dtype, reduce or torch.float32)


def narrowed(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Inputs of a forward pass with their fp32 tensors in the dtype that weights compute in; as they are for None."""

    def narrow(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_wide else value

    return inputs if dtype is None else tree_map(narrow, inputs)
