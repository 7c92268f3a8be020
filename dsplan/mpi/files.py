"""Arrays in safetensors files, written and read one at a time with numpy alone.

The format is 8 bytes of length, a JSON header, and the data without gaps. bfloat16, which numpy has not, is in memory
as the fp32 of the same values. Complex numbers are stored as pairs along a last dimension.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsplan.mpi.arrays import Array
from strategies.checkpoint.reading import Stored as Place
from strategies.checkpoint.reading import fill, header_of, opened, shown
from strategies.errors import BrokenFile, CannotRun

# A rank's part of an array; a checkpoint assembles the array from all ranks.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A piece of an array of `shape`.

    Args:
        values: the piece.
        shape: of the whole array.
        start: where the piece begins: one index per dimension for a box, or one number for a run of the flattened array
            (`values` is then flat).

    Raises:
        CannotRun: the piece does not lie within the whole.
    """

    values: Array
    shape: tuple[int, ...]
    start: tuple[int, ...] | int

    def __post_init__(self) -> None:
        if not isinstance(self.values, np.ndarray):
            raise CannotRun(f"a part's values are of type {type(self.values).__name__}; they must be a numpy array")
        size = (int(np.prod(self.shape, dtype=np.int64)),) if isinstance(self.start, int) else self.shape
        start = (self.start,) if isinstance(self.start, int) else self.start
        inside = len(start) == self.values.ndim == len(size) and all(
            min(low, whole - low - long) >= 0 for low, long, whole in zip(start, self.values.shape, size, strict=True)
        )
        if not inside:
            raise CannotRun(
                f"a part of shape {list(self.values.shape)} at {self.start} lies outside of an array of shape"
                f" {list(self.shape)}"
            )

    @property
    def region(self) -> Region:
        """The piece's region of the whole."""
        return Region(start=self.start, shape=self.values.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A piece's place in its whole; `start` as in `Part`, `shape` the piece's own."""

    start: tuple[int, ...] | int
    shape: tuple[int, ...]

    def within(self, whole: Array) -> Array:
        """Return the piece of a whole array, as a view where the whole is contiguous."""
        if isinstance(self.start, int):
            return whole.reshape(-1)[self.start : self.start + self.shape[0]]
        view: Array = whole[self._slices()] if self.shape else whole.reshape(())
        return view

    def copy_to(self, whole: Array, values: Array) -> None:
        """Write the piece into a contiguous whole array."""
        self.within(whole)[...] = values

    def overlaps(self, other: Region) -> bool:
        """Return whether both have elements in common; True where that takes more than comparing bounds to know."""
        if isinstance(self.start, int) != isinstance(other.start, int):
            return True
        mine, others = self._slices(), other._slices()
        return all(own.start < other.stop and other.start < own.stop for own, other in zip(mine, others, strict=True))

    def _slices(self) -> tuple[slice, ...]:
        start = (self.start,) if isinstance(self.start, int) else self.start
        return tuple(slice(low, low + long) for low, long in zip(start, self.shape, strict=True))


_WORDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "F32",
    "complex128": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileArray:
    """An array of a file: its key, dtype (numpy's word, or bfloat16), shape, and where its values are to be had."""

    key: str
    word: str
    shape: tuple[int, ...]
    values: Callable[[], Array]


def can_hold(word: str) -> bool:
    """Return whether arrays of a dtype can be stored."""
    return word in _WORDS


def bytes_of(values: Array, word: str) -> Array:
    """Return the bytes that stand for an array in the file, [n] of uint8; without a copy where it lies contiguous."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if word == "bfloat16":
        flat = (flat.view(np.uint32) >> 16).astype(np.uint16)
    little: Array = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8)


def digest_of(data: Array) -> str:
    """16 bytes that tell contents apart, as text."""
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def write(path: Path, arrays: Sequence[FileArray]) -> None:
    """Write a file, and wait until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    # The widest first, so that each begins at a multiple of its item's size.
    arrays = sorted(arrays, key=lambda array: -_item_size(array.word))
    with open(path, "wb") as file:
        file.write(_header(arrays))
        for array in arrays:
            file.write(bytes_of(array.values(), array.word).data)
        file.flush()
        os.fsync(file.fileno())


def header(folder: Path, name: str) -> dict[str, Place]:
    """Return where each array of a file lies, by its key.

    Raises:
        BrokenFile: the file is not there, or none that dsplan writes.
    """
    with opened(folder, name) as file:
        return header_of(file, folder / name)


def read(path: Path, key: str, span: Place, word: str, digest: str) -> Array:
    """Return the values of one array, flat.

    Raises:
        BrokenFile: the file is not there, or holds something else than was written.
    """
    data = np.empty(span.end - span.begin, dtype=np.uint8)
    with opened(path.parent, path.name) as file:
        file.seek(span.begin)
        fill(file, path, data.data)
    if digest_of(data) != digest:
        raise BrokenFile(path, f"{shown(key)} does not hold what was saved", "load another step")
    if word == "bfloat16":
        widened: Array = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return widened
    dtype = np.dtype(word)
    values: Array = data.view(dtype.newbyteorder("<")).astype(dtype, copy=True)
    return values


def bytes_for(word: str, shape: Sequence[int]) -> int:
    """Bytes that an array takes in a file."""
    return _item_size(word) * math.prod(shape)


def _item_size(word: str) -> int:
    return 2 if word == "bfloat16" else np.dtype(word).itemsize


def _header(arrays: Sequence[FileArray]) -> bytes:
    head: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "np"}}
    at = 0
    for array in arrays:
        end = at + _item_size(array.word) * int(np.prod(array.shape, dtype=np.int64))
        shape = [*array.shape, 2] if array.word.startswith("complex") else list(array.shape)
        head[array.key] = {"dtype": _WORDS[array.word], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
