"""One safetensors file, written piece by piece while its checksum is made.

The safetensors library writes from a copy of all its bytes and makes no checksum; this writes the same format
(8 bytes length, JSON header, data without gaps) holding one tensor at a time. `strategies.checkpoint.reading` reads it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch

from strategies.checkpoint.object_store import MANIFEST
from strategies.checkpoint.reading import Damaged, is_count, json_object, opened, read_bytes, shown, size_of
from strategies.errors import CannotRun
from strategies.run_directory.heartbeat import beat

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
    """Return the entries of a file of (key, dtype, shape), widest dtypes first, so that all are aligned.

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


def cut(entries: Sequence[Entry], limit_bytes: int | None) -> list[list[Entry]]:
    """Return the entries of several files, each of `limit_bytes` at most or of one entry; of one file for None."""
    parts, begin = [list[Entry]()], 0
    for entry in entries:
        if parts[-1] and limit_bytes is not None and entry.end - begin > limit_bytes:
            parts.append([])
            begin = entry.begin
        parts[-1].append(replace(entry, begin=entry.begin - begin, end=entry.end - begin))
    return parts


def write(
    path: Path,
    entries: Sequence[Entry],
    data: Iterable[memoryview],
    notes: dict[str, str],
    durable: bool = True,
) -> FileSum:
    """Write a file of `data` end to end, with `notes` as `__metadata__`; `durable` waits until the disk has it.

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
        if durable:
            os.fsync(file.fileno())
    return FileSum(bytes=size, crc32=crc)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes; without a copy where it lies contiguous in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if not flat.numel():
        return memoryview(bytearray())
    # Not `Tensor.numpy`: that marks the storage as memory of others for good, which is not counted as the run's own.
    memory: Any = (ctypes.c_ubyte * flat.numel()).from_address(flat.data_ptr())
    memory.tensor = flat  # as long as anybody looks at its bytes
    return memoryview(memory).cast("B")


def sum_of(path: Path) -> FileSum:
    """Return size and checksum of a file that is there.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return sum_of_open(file)


def sum_of_open(file: BinaryIO) -> FileSum:
    """Return size and checksum of an open file, from where it stands.

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


FILE = MANIFEST
"""Of a checkpoint's files: a flipped bit, a missing or a cut file shows before anything is used."""
_LONGEST = 2**26
"""Bytes of the list: half a million files."""


def text_of(sums: Mapping[str, FileSum]) -> str:
    """Return the text of a `checksums.json`; `crc32` is that of its own list."""
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    return json.dumps({"files": files, "crc32": _own(files)}, indent=1) + "\n"


def read(folder: Path) -> dict[str, FileSum]:
    """Return the sums that a checkpoint was published with.

    Raises:
        Damaged: there are none, or they are damaged themselves.
    """
    path = folder / FILE
    values = json_object(path, read_bytes(folder, FILE, _LONGEST))
    files = values.get("files")
    if not isinstance(files, dict) or _own(files) != values.get("crc32"):
        raise Damaged(path, "is damaged: it does not match its own checksum")
    sums = {}
    for name, entry in files.items():
        if not isinstance(entry, dict) or not all(is_count(entry.get(key)) for key in ("bytes", "crc32")):
            raise Damaged(path, f"has no size and checksum of {shown(name)}")
        sums[name] = FileSum(bytes=entry["bytes"], crc32=entry["crc32"])
    return sums


def checked_bytes_of(folder: Path, name: str, sums: Mapping[str, FileSum]) -> bytes:
    """Read all of a small file, as it was written.

    Raises:
        Damaged: it is not.
    """
    if name not in sums:
        raise Damaged(folder / name, f"is not listed in {FILE}")
    data = read_bytes(folder, name)
    _compare(folder / name, FileSum(bytes=len(data), crc32=zlib.crc32(data)), sums[name])
    return data


def require_size(folder: Path, name: str, expected: FileSum) -> None:
    """Look at a file's length, and raise `Damaged` where it is another."""
    with opened(folder, name) as file:
        _require_length(folder / name, size_of(file), expected)


def require_bytes(folder: Path, name: str, expected: FileSum) -> None:
    """Read a file of any length, once, and raise `Damaged` where it is not as it was written."""
    with opened(folder, name) as file:
        _compare(folder / name, sum_of_open(file), expected)


def _compare(path: Path, actual: FileSum, expected: FileSum) -> None:
    _require_length(path, actual.bytes, expected)
    if actual.crc32 != expected.crc32:
        raise Damaged(path, "is damaged: its checksum is not what was written")


def _require_length(path: Path, size: int, expected: FileSum) -> None:
    if size != expected.bytes:
        raise Damaged(path, f"has {size} of {expected.bytes} bytes")


def _own(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())
