"""Which directories all nodes share: rank 0 writes a file, the others look for it. No torch."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

_PREFIX = ".dsplan-doctor-"
_SEEN_SECONDS = 3.0  # NFS keeps what it knows of a directory for that long by default (acdirmin is 30 s for listings)
_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def tokens(directories: Sequence[Path]) -> Iterator[dict[str, str]]:
    """A file of a new name in each directory, by directory, while the context lasts; empty where none could be
    written."""
    written: dict[str, str] = {}
    try:
        for directory in directories:
            path = directory / f"{_PREFIX}{uuid.uuid4().hex}"
            written[str(directory)] = ""
            with contextlib.suppress(OSError):
                path.touch()
                written[str(directory)] = path.name
        yield written
    finally:
        for directory_name, name in written.items():
            if name:
                Path(directory_name, name).unlink(missing_ok=True)


def unseen(written: dict[str, str]) -> list[str]:
    """The directories in which this node does not see rank 0's file within a few seconds."""
    waiting = [directory for directory, name in written.items() if name]
    until = time.monotonic() + _SEEN_SECONDS
    while waiting and time.monotonic() < until:
        waiting = [directory for directory in waiting if not Path(directory, written[directory]).exists()]
        if waiting:
            time.sleep(_LOOK_SECONDS)
    return waiting
