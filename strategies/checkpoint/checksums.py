"""Checksums of a checkpoint's files: a flipped bit, a missing or a cut file is found before anything is used."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strategies.checkpoint.reading import Damaged, is_count, json_object, opened, read_bytes, shown, size_of
from strategies.checkpoint.safefile import FileSum, sum_of_open

FILE = "checksums.json"
_LONGEST = 2**26
"""Bytes of the list: half a million files."""


def text_of(sums: Mapping[str, FileSum]) -> str:
    """The text of a `checksums.json`; `crc32` is that of its own list."""
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    return json.dumps({"files": files, "crc32": _own(files)}, indent=1) + "\n"


def read(folder: Path) -> dict[str, FileSum]:
    """The sums that a checkpoint was published with.

    Raises:
        Damaged: there are none, or they are damaged themselves.
    """
    path = folder / FILE
    values = json_object(path, read_bytes(folder, FILE, _LONGEST))
    files = values.get("files")
    if not isinstance(files, dict) or _own(files) != values.get("crc32"):
        raise Damaged(path, "is damaged: it does not match its own checksum")
    sums = {}
    for name, one in files.items():
        if not isinstance(one, dict) or not all(is_count(one.get(key)) for key in ("bytes", "crc32")):
            raise Damaged(path, f"has no size and checksum of {shown(name)}")
        sums[name] = FileSum(bytes=one["bytes"], crc32=one["crc32"])
    return sums


def bytes_of(folder: Path, name: str, sums: Mapping[str, FileSum]) -> bytes:
    """All of a small file, as it was written.

    Raises:
        Damaged: it is not.
    """
    if name not in sums:
        raise Damaged(folder / name, f"is not listed in {FILE}")
    data = read_bytes(folder, name)
    _compare(folder / name, FileSum(bytes=len(data), crc32=zlib.crc32(data)), sums[name])
    return data


def require_size(folder: Path, name: str, expected: FileSum) -> None:
    """
    Raises:
        Damaged: the file is not there in its length.
    """
    with opened(folder, name) as file:
        _require_length(folder / name, size_of(file), expected)


def require_bytes(folder: Path, name: str, expected: FileSum) -> None:
    """Read a file of any length, once.

    Raises:
        Damaged: it is not as it was written.
    """
    with opened(folder, name) as file:
        _compare(folder / name, sum_of_open(file), expected)


def _compare(path: Path, found: FileSum, expected: FileSum) -> None:
    _require_length(path, found.bytes, expected)
    if found.crc32 != expected.crc32:
        raise Damaged(path, "is damaged: its checksum is not what was written")


def _require_length(path: Path, size: int, expected: FileSum) -> None:
    if size != expected.bytes:
        raise Damaged(path, f"has {size} of {expected.bytes} bytes")


def _own(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())
