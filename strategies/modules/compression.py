"""Gradient communication: what a script's `communication` section means to the strategy that runs.

16 bits are the dtype in which ranks add up; 8 bits are codes with scales (`strategies/backends/zero/compress.py`),
which our own ZeRO and DDP exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.cost.combinations import compresses
from planner.cost.precision import INT8_BLOCK, SCALE_BYTES
from strategies.errors import CannotRun
from strategies.modules.precision import DTYPES
from strategies.protocols import TrainingParts

_LARGEST = 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Values in `block`s of one scale each; a message is the scales in fp32 and then a byte for each value."""

    block: int = INT8_BLOCK
    error_feedback: bool = True

    def blocks(self, elements: int) -> int:
        """Return the blocks that so many values fill, the last one in part."""
        return -(-elements // self.block)

    def message_bytes(self, elements: int) -> int:
        """Return the bytes of a message of so many values, which fill whole blocks."""
        return self.blocks(elements) * (self.block + SCALE_BYTES)

    def room(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        """Return zeros in fp32 for so many values and the rest of the last block."""
        return torch.zeros(self.blocks(elements) * self.block, dtype=torch.float32, device=like.device)

    def encode(self, values: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
        """Return the message, uint8 [message_bytes], of values [n] plus `error` [n], which is replaced by this time's.

        What is not finite stays so: its block arrives as NaN, and leaves no error.
        """
        elements, blocks = values.numel(), self.blocks(values.numel())
        wide = self.room(elements, values)
        wide[:elements].copy_(values)
        if error is not None:
            wide[:elements].add_(error)
        rows = wide.view(blocks, self.block)
        message = torch.empty(self.message_bytes(elements), dtype=torch.uint8, device=values.device)
        scales, codes = self._parts(message, blocks)
        torch.div(torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True), _LARGEST, out=scales)
        steps = scales.clamp_min(torch.finfo(torch.float32).tiny)
        rows.div_(steps)
        codes.copy_(rows.round())
        if error is not None:
            rows.sub_(codes).mul_(steps).nan_to_num_(0.0, 0.0, 0.0)
            error.copy_(wide[:elements])
        return message

    def add(self, message: torch.Tensor, total: torch.Tensor) -> None:
        """Add a message's values to `total`, a `room` for as many."""
        blocks = total.numel() // self.block
        scales, codes = self._parts(message, blocks)
        total.view(blocks, self.block).addcmul_(codes, scales)

    def _parts(self, message: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a message: scales, fp32 [blocks, 1], and codes, int8 [blocks, block]."""
        scales = message[: blocks * SCALE_BYTES].view(torch.float32).view(blocks, 1)
        return scales, message[blocks * SCALE_BYTES :].view(torch.int8).view(blocks, self.block)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTravel:
    """The form in which gradients travel between ranks."""

    dtype: torch.dtype | None = None
    """The dtype that they are summed in; None: as they are made."""
    codec: Codec | None = None
    """Their 8-bit codec."""


def gradient_travel(parts: TrainingParts) -> GradientTravel:
    """Return what the config asks for, under the strategy of the plan.

    Raises:
        CannotRun: the strategy cannot, or two keys say different things.
    """
    section, configuration = parts.script.communication, parts.plan.configuration
    compression = configuration.gradient_compression if section.compression == "none" else section.compression
    dtype = None if section.data_type is None else DTYPES[section.data_type]
    if compression == "int8":
        if not compresses(configuration.strategy, configuration.backend, compression):
            raise CannotRun(
                f"config: communication.compression 'int8' does not run under strategy {configuration.strategy!r}"
                f" ({configuration.backend}); use 'bf16' there, or ddp, or zero1, zero2 or zero3 with backend 'native'"
            )
        codec = Codec(block=section.block_size, error_feedback=section.error_feedback)
        return GradientTravel(dtype=dtype, codec=codec)
    if compression == "none":
        return GradientTravel(dtype=dtype)
    if section.data_type not in (None, compression):
        raise CannotRun(
            f"config: communication.compression {compression!r} and communication_data_type"
            f" {section.data_type!r} differ; leave one out"
        )
    return GradientTravel(dtype=DTYPES[compression])
