"""Compressed gradients: what one of them takes between ranks, and what a rank remembers of its rounding.

Source: `strategies/zero/codec.py` and `compress.py`: a byte for each gradient and an fp32 scale for each block, and an
error of 2 bytes for each gradient that was rounded.
"""

from __future__ import annotations

from planner.vocabulary import Compression

BLOCK = 1024
"""Gradients that share a scale, unless a config says otherwise."""
INT8_BYTES = 1 + 4 / BLOCK
ERROR_BYTES = 2


def wire_bytes(compression: Compression, width: float) -> float:
    """Bytes of a gradient between ranks, `width` where nothing compresses it."""
    if compression == "int8":
        return INT8_BYTES
    return width if compression == "none" else 2.0
