"""One safetensors file, written piece by piece while its checksum is made.

The safetensors library writes from a copy of all its bytes and makes no checksum; this writes the same format
(8 bytes length, JSON header, data without gaps) holding one tensor at a time. `strategies.checkpoint.reading` reads it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from strategies.errors import CannotRun
from strategies.supervised.pulse import beat

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_SLICE = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of a file: its key, dtype and shape, and the bytes of the data section that hold it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSum:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


def lay_out(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Entry]:
    """The entries of a file of (key, dtype, shape), widest dtypes first, so that all are aligned.

    Raises:
        CannotRun: safetensors has no such dtype.
    """
    entries: list[Entry] = []
    begin = 0
    for key, dtype, shape in sorted(tensors, key=lambda item: -item[1].itemsize):
        if dtype not in _WORDS:
            raise CannotRun(f"checkpoint: {key} is {dtype}, which safetensors cannot hold; convert it before training")
        end = begin + math.prod(shape) * dtype.itemsize
        entries.append(Entry(key=key, dtype=dtype, shape=tuple(shape), begin=begin, end=end))
        begin = end
    return entries


def write(path: Path, entries: Sequence[Entry], data: Iterable[memoryview], notes: dict[str, str]) -> FileSum:
    """Write a file whose data section is `data` end to end, and wait until the disk has it.

    Args:
        notes: texts for the header's `__metadata__`.

    Raises:
        OSError: it cannot be written.
    """
    size = crc = 0
    with open(path, "wb") as file:
        for slab in _slabs(chain((memoryview(_header(entries, notes)),), data)):
            crc = zlib.crc32(slab, crc)
            size += file.write(slab)
            beat()
        file.flush()
        os.fsync(file.fileno())
    return FileSum(bytes=size, crc32=crc)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes; without a copy where it lies contiguous in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file that is there.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return sum_of_open(file)


def sum_of_open(file: BinaryIO) -> FileSum:
    """Size and checksum of an open file, from where it stands.

    Raises:
        OSError: it cannot be read.
    """
    size = crc = 0
    buffer = memoryview(bytearray(_SLICE))
    while length := file.readinto(buffer):  # type: ignore[attr-defined]
        crc = zlib.crc32(buffer[:length], crc)
        size += length
        beat()
    return FileSum(bytes=size, crc32=crc)


def _slabs(data: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in data:
        for start in range(0, len(piece), _SLICE):
            yield piece[start : start + _SLICE]


def _header(entries: Sequence[Entry], notes: dict[str, str]) -> bytes:
    head: dict[str, object] = {"__metadata__": notes}
    for entry in entries:
        head[entry.key] = {
            "dtype": _WORDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
