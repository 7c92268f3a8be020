"""Codec: a run of gradients as bytes.

A run is cut into blocks; a block's largest magnitude becomes 127 and the rest whole numbers in proportion (block-wise
quantization: Dettmers et al. 2022, section 2.1), so that fp32 shrinks to a quarter and one scale per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST = 127
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Values in `block`s of one scale each; a message is the scales in fp32 and then a byte for each value."""

    block: int = 256
    error_feedback: bool = True

    def blocks(self, elements: int) -> int:
        return -(-elements // self.block)

    def message_bytes(self, elements: int) -> int:
        """Bytes of a message of so many values, which fill whole blocks."""
        return self.blocks(elements) * (self.block + _SCALE_BYTES)

    def room(self, elements: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros in fp32 for so many values and the rest of the last block."""
        return torch.zeros(self.blocks(elements) * self.block, dtype=torch.float32, device=like.device)

    def encode(self, values: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
        """The message, uint8 [message_bytes], of values [n] with the error [n] of the last time, which becomes this
        time's. What is not finite stays so: its block arrives as NaN, and leaves no error."""
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
        """Views of a message: scales, fp32 [blocks, 1], and codes, int8 [blocks, block]."""
        scales = message[: blocks * _SCALE_BYTES].view(torch.float32).view(blocks, 1)
        return scales, message[blocks * _SCALE_BYTES :].view(torch.int8).view(blocks, self.block)
