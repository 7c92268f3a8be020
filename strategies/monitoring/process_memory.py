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
        # Kept open, which halves the time to read it; in a process that forks off it stays the parent's.
        self._file = os.open(_STATM, os.O_RDONLY) if self._process is None else -1

    def read(self) -> dict[str, int]:
        """`rss_bytes` and `private_bytes`; on systems without /proc both are what psutil calls rss."""
        if self._process is not None:
            resident = self._process.memory_info().rss
            return {"rss_bytes": resident, "private_bytes": resident}
        pages = os.pread(self._file, 128, 0).split()
        resident, shared = int(pages[1]) * self._page, int(pages[2]) * self._page
        return {"rss_bytes": resident, "private_bytes": resident - shared}

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()
