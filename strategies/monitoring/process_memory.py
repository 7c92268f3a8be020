"""This process's memory, read in microseconds. No torch."""

from __future__ import annotations

import os

import psutil

_STATM = "/proc/self/statm"


class ProcessMemory:
    """Resident bytes, and those of them that no file backs: pages of mapped data come and go as they are read."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        self._process = None if os.path.exists(_STATM) else psutil.Process()

    def read(self) -> dict[str, int]:
        """`rss_bytes` and `private_bytes`; on systems without /proc both are what psutil calls rss."""
        if self._process is not None:
            resident = self._process.memory_info().rss
            return {"rss_bytes": resident, "private_bytes": resident}
        # Opened every time: a process that forked would read its parent's.
        with open(_STATM, "rb", buffering=0) as file:
            pages = file.read().split()
        resident, shared = int(pages[1]) * self._page, int(pages[2]) * self._page
        return {"rss_bytes": resident, "private_bytes": resident - shared}
