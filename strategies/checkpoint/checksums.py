"""Checksums of a checkpoint's files: a flipped bit, a missing or a cut file is found before anything is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strategies.checkpoint.safefile import FileSum, sum_of

FILE = "checksums.json"


def text_of(sums: Mapping[str, FileSum]) -> str:
    """The text of a `checksums.json`; `crc32` is that of its own list."""
    files = {name: asdict(sums[name]) for name in sorted(sums)}
    return json.dumps({"files": files, "crc32": _own(files)}, indent=1) + "\n"


def read(folder: Path) -> dict[str, FileSum]:
    """The sums that a checkpoint was published with.

    Raises:
        OSError: there are none.
        ValueError: they are damaged themselves.
    """
    try:
        values = json.loads((folder / FILE).read_bytes())
        files = values["files"]
        if _own(files) != values["crc32"]:
            raise ValueError
        return {str(name): FileSum(bytes=int(one["bytes"]), crc32=int(one["crc32"])) for name, one in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("is damaged: it does not match its own checksum") from None


def damage(folder: Path, share: int = 0, shares: int = 1) -> tuple[Path, str] | None:
    """The first file of a checkpoint that is not as it was written, and what is wrong; None where all are.

    Looks at every `shares`-th file, beginning with `share`: ranks divide the work.
    """
    try:
        sums = read(folder)
    except OSError as problem:
        return folder / FILE, f"cannot be read ({problem.strerror})"
    except ValueError as problem:
        return folder / FILE, str(problem)
    for name in sorted(sums)[share::shares]:
        problem_of_file = _compare(folder / name, sums[name])
        if problem_of_file is not None:
            return folder / name, problem_of_file
    return None


def _compare(path: Path, expected: FileSum) -> str | None:
    try:
        found = sum_of(path)
    except OSError as problem:
        return "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read ({problem.strerror})"
    if found.bytes != expected.bytes:
        return f"has {found.bytes} of {expected.bytes} bytes"
    return None if found.crc32 == expected.crc32 else "is damaged: its checksum is not what was written"


def _own(files: Any) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())
