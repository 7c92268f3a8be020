"""The dtypes that a plan's precision means for weights, for computing, and for autocast (DESIGN)."""

from __future__ import annotations

import torch

from planner.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


def weight_dtype(configuration: Configuration) -> torch.dtype | None:
    """What the model's weights are cast to before training; None leaves them as they are."""
    casts = configuration.precision == "bf16-pure" or configuration.zero_stage > 0
    return _SIXTEEN_BITS.get(configuration.precision) if casts else None


def autocast_dtype(configuration: Configuration) -> torch.dtype | None:
    """What autocast computes in; None where there is no autocast."""
    casts = configuration.precision in ("bf16", "fp16") and configuration.strategy in ("single", "ddp")
    return _SIXTEEN_BITS[configuration.precision] if casts else None


def gathered_dtype(configuration: Configuration) -> torch.dtype | None:
    """What FSDP gathers and computes in over fp32 shards, reducing gradients in fp32; None where it changes nothing."""
    casts = configuration.precision in ("bf16", "fp16") and configuration.strategy in FSDP_STRATEGIES
    return _SIXTEEN_BITS[configuration.precision] if casts else None
