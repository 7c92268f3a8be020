"""Reading what may be damaged or made by somebody else: plain files of one folder, strict JSON, safetensors headers.

No name, size, type or nesting is believed because a file says so. Only regular files that lie in the folder are opened,
so that no pipe blocks and no link or `..` leads out; what is read has a limit; every problem is one `Damaged`. Needs
neither torch nor numpy, and nothing that it reads can be executed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise, starmap
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from strategies.checkpoint.object_store import ObjectFile, ObjectPath
from strategies.errors import BrokenFile

LONGEST_TEXT = 2**30
"""Bytes of JSON that are read at most: the list of 4,000 tensors in 1,024 boxes each has half of that."""
DEEPEST = 200
"""How deep lists and dicts of a checkpoint's JSON may be nested."""
_LONGEST_HEADER = 100_000_000
_SLICE = 2**24
_FEW = 64
_MOST_DIMENSIONS = 64
_LARGEST = 2**63
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "C64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


class Damaged(BrokenFile):
    """A file of a checkpoint that is not as dsplan wrote it: `path`, and the `problem` with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem, "name another checkpoint")
        self.path, self.problem = path, problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box of a tensor in a file: where it begins in the tensor, its size, the file's name and its key there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor of a safetensors file: dtype, shape, and the bytes of the file that hold it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box."""


def shown(text: object) -> str:
    """Return a name out of a file, in quotes, on one line and not too long."""
    quoted = ascii(str(text)) if not str(text).isprintable() else repr(str(text))
    return quoted if len(quoted) <= 120 else f"{quoted[:117]}..."


@contextmanager
def opened(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Open a regular file in a folder or below it, or an object of a store.

    Raises:
        Damaged: it is missing, something else, cannot be read, or its name leads out of the folder.
    """
    path = folder / name if _stays_inside(name) else folder
    if path is folder:
        raise Damaged(folder, f"names a file {shown(name)}, which does not lie in it")
    if isinstance(path, ObjectPath):
        with _object_opened(path) as file:
            yield file
        return
    above = [folder.joinpath(*PurePosixPath(name).parts[:depth]) for depth in range(1, len(PurePosixPath(name).parts))]
    try:
        link = next((parent for parent in above if parent.is_symlink()), None)
        if link is not None:
            raise Damaged(link, "is a link; put what it leads to in its place")
        _require_regular(path, path.lstat().st_mode)
        with open(path, "rb", buffering=0, opener=_open) as file:
            # A second look, at what was opened: names may have changed hands meanwhile.
            _require_regular(path, os.fstat(file.fileno()).st_mode)
            yield file
    except OSError as problem:
        raise _unreadable(path, problem) from None


@contextmanager
def _object_opened(path: ObjectPath) -> Iterator[BinaryIO]:
    try:
        with ObjectFile.open(path) as file:
            yield file
    except FileNotFoundError:
        raise Damaged(path, "is missing") from None


def size_of(file: BinaryIO) -> int:
    """Return the bytes of an open file."""
    return file.size if isinstance(file, ObjectFile) else os.fstat(file.fileno()).st_size


def read_bytes(folder: Path, name: str, limit: int = LONGEST_TEXT) -> bytes:
    """Read all of a small file.

    Raises:
        Damaged: as `opened`, or it is longer than `limit`.
    """
    with opened(folder, name) as file:
        size = size_of(file)
        data = b"" if size > limit else _exactly(file, folder / name, size)
    if size > limit:
        raise Damaged(folder / name, f"has {size} bytes, and no checkpoint's has more than {limit}")
    return data


def json_object(path: Path, data: bytes, deepest: int = DEEPEST) -> dict[str, Any]:
    """Return the JSON object that bytes of `path` are, nested at most `deepest` deep.

    Raises:
        Damaged: they are none, have a key twice, or are nested too deep.
    """
    try:
        values = json.loads(data.decode("utf-8"), object_pairs_hook=_with_unique_keys)
        too_deep = is_deep(values, deepest)
    except RecursionError:
        values, too_deep = None, True
    except UnicodeDecodeError:
        raise Damaged(path, "is damaged: it is not UTF-8") from None
    except ValueError as problem:
        raise Damaged(path, f"is damaged: it is not JSON ({problem})" if data else "is empty") from None
    if too_deep:
        raise Damaged(path, f"is nested more than {deepest} deep")
    if not isinstance(values, dict):
        raise Damaged(path, "does not hold a JSON object")
    return values


def is_deep(values: Any, deepest: int = DEEPEST) -> bool:
    """Return whether lists and dicts are nested deeper than that."""
    level = [values]
    for _ in range(deepest):
        inner = [value for value in level if isinstance(value, (dict, list, tuple))]
        level = [
            below for container in inner for below in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return any(isinstance(value, (dict, list, tuple)) for value in level)


def is_count(value: Any) -> bool:
    """Return whether a value of JSON is a whole number from 0 on that a 64-bit integer holds."""
    return type(value) is int and 0 <= value < _LARGEST


def counts(values: Any) -> tuple[int, ...] | None:
    """Return a shape or an offset of JSON, or None if it is none."""
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS or not all(map(is_count, values)):
        return None
    return tuple(values)


def header_of(file: BinaryIO, path: Path) -> dict[str, Stored]:
    """Return the tensors of an open safetensors file by their keys; together they are all of its bytes, each once.

    Raises:
        Damaged: they are not, or the header is none.
    """
    size = size_of(file)
    length = int.from_bytes(_exactly(file, path, min(8, size)), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise Damaged(path, f"is damaged: its header cannot have {length} bytes in a file of {size}")
    values = json_object(path, _exactly(file, path, length))
    values.pop("__metadata__", None)
    tensors = {key: _stored(path, key, entry, 8 + length) for key, entry in values.items()}
    spans = sorted((stored.begin, stored.end) for stored in tensors.values())
    edges = [(8 + length, 8 + length), *spans, (size, size)]
    if any(before[1] != after[0] for before, after in pairwise(edges)):
        raise Damaged(path, "is damaged: its tensors leave bytes out or share them")
    return tensors


def why_no_cover(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Return why boxes of (offsets, sizes) are not a tensor of `shape`, each element once; None where they are."""
    full: list[Span] = []
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a box has {len(sizes)} dimensions and the tensor {len(shape)}"
        spans = zip(offsets, sizes, shape, strict=True)
        if any(low < 0 or long < 0 or low + long > whole for low, long, whole in spans):
            return f"the box of {list(sizes)} at {list(offsets)} lies outside of {list(shape)}"
        if math.prod(sizes):
            full.append((tuple(offsets), tuple(sizes)))
    elements, whole = sum(math.prod(sizes) for _, sizes in full), math.prod(shape)
    if elements != whole:
        return f"its boxes hold {elements} elements of {whole}"
    return None if _come_apart(full, len(shape)) else "its boxes overlap"


def _come_apart(boxes: list[Span], dimensions: int) -> bool:
    """Return whether no boxes overlap: straight cuts part them, as they do the grids and runs that strategies write.

    Overlapping boxes cannot be parted. What is left when the number of cuts within cuts has reached its limit is
    compared each with each, where it is little: so the time has a limit too.
    """
    groups = [boxes]
    for _ in range(2 * dimensions + 2):
        groups = [part for group in groups if len(group) > 1 for part in _cut(group, dimensions)]
        if not groups:
            return True
    return all(len(group) <= _FEW and not any(starmap(_overlap, combinations(group, 2))) for group in groups)


def _overlap(one: Span, two: Span) -> bool:
    return all(a < b + long_b and b < a + long_a for a, long_a, b, long_b in zip(*one, *two, strict=True))


def _cut(group: list[Span], dimensions: int) -> list[list[Span]]:
    """Return the parts that straight cuts across one dimension make of a group; itself where there is no cut."""
    for dimension in range(dimensions):
        end, parts = -1, list[list[Span]]()
        for box in sorted(group, key=lambda box: box[0][dimension]):
            low, long = box[0][dimension], box[1][dimension]
            if low >= end:
                parts.append([])
            parts[-1].append(box)
            end = max(end, low + long)
        if len(parts) > 1:
            return parts
    return [group]


def _stored(path: Path, key: str, entry: Any, data_begins: int) -> Stored:
    described = entry if isinstance(entry, dict) else {}
    dtype, shape, span = described.get("dtype"), counts(described.get("shape")), counts(described.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES or shape is None or span is None or len(span) != 2:
        raise Damaged(path, f"is damaged: its header does not say what {shown(key)} is")
    if span[1] - span[0] != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise Damaged(path, f"is damaged: {shown(key)} of shape {list(shape)} has {span[1] - span[0]} bytes")
    return Stored(dtype=dtype, shape=shape, begin=data_begins + span[0], end=data_begins + span[1])


def fill(file: BinaryIO, path: Path, buffer: memoryview) -> None:
    """Read the next bytes of an open file, as many as the buffer takes.

    Raises:
        Damaged: there are not as many.
    """
    filled = 0
    while filled < len(buffer):
        length = file.readinto(buffer[filled : filled + _SLICE])  # type: ignore[attr-defined]
        if not length:
            raise Damaged(path, "was cut while it was read")
        filled += length


def _exactly(file: BinaryIO, path: Path, size: int) -> bytes:
    data = bytearray(size)
    fill(file, path, memoryview(data))
    return bytes(data)


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the key {shown(twice)} twice")
    return values


def _stays_inside(name: str) -> bool:
    try:
        os.fsencode(name)
    except ValueError:
        return False
    parts = PurePosixPath(name).parts
    # "a//b" and "./a" are other names for files that have one already.
    return bool(parts) and "\0" not in name and ".." not in parts and "/".join(parts) == name and not Path(name).drive


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise Damaged(path, "is a link; put what it leads to in its place")
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device or socket"
        raise Damaged(path, f"is a {kind} and no regular file")


def _unreadable(path: Path, problem: OSError) -> Damaged:
    if problem.errno == errno.ENOENT:
        return Damaged(path, "is missing")
    return Damaged(path, f"cannot be read ({problem.strerror})")
