"""How gradients travel: what a script's `communication` section asks of the strategy that runs.

16 bits are the dtype in which ranks add up; 8 bits are codes with scales (`strategies/zero/compress.py`), which our own
ZeRO and DDP exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.estimate import compresses
from strategies.errors import CannotRun
from strategies.protocols import TrainingParts
from strategies.zero.codec import Codec

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTravel:
    """The `dtype` that gradients are summed over ranks in, None as they are made, and the 8-bit `codec`, if any."""

    dtype: torch.dtype | None = None
    codec: Codec | None = None


def gradient_travel(parts: TrainingParts) -> GradientTravel:
    """What the config asks for, under the strategy of the plan.

    Raises:
        CannotRun: the strategy cannot, or two keys say different things.
    """
    section, configuration = parts.script.communication, parts.plan.configuration
    compression = configuration.gradient_compression if section.compression == "none" else section.compression
    if compression == "int8":
        if not compresses(configuration.strategy, configuration.backend, compression):
            raise CannotRun(
                f"config: communication.compression 'int8' does not run under strategy {configuration.strategy!r}"
                f" ({configuration.backend}); use 'bf16' there, or ddp, or zero1, zero2 or zero3 with backend 'native'"
            )
        codec = Codec(block=section.block_size, error_feedback=section.error_feedback)
        return GradientTravel(dtype=_dtype(section.data_type), codec=codec)
    if compression == "none":
        return GradientTravel(dtype=_dtype(section.data_type))
    if section.data_type not in (None, compression):
        raise CannotRun(
            f"config: communication.compression {compression!r} and communication_data_type"
            f" {section.data_type!r} differ; leave one out"
        )
    return GradientTravel(dtype=_dtype(compression))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]
