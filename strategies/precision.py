"""What each precision of a plan means under the torch strategies.

`single` and `ddp` compute `bf16` and `fp16` under autocast over fp32 weights, as HF Trainer does. FSDP keeps fp32
shards, computes in 16 bits and reduces gradients in fp32. `bf16-pure` keeps everything, optimizer states too, in bf16.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

_COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
