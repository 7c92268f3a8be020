"""The last rows of a run's metrics, for a page that is drawn again and again while they grow."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strategies.run_directory.files import metrics_files
from strategies.telemetry.follow import LineFollower
from strategies.telemetry.metrics import parse_row


class RecentRows:
    """The last metrics rows of every rank, `MOST` of all together, for a page that is drawn again and again.

    The run may be of any length: lines are read once, and of a long file its end alone.
    """

    MOST = 20_000
    ROW_BYTES = 600
    """A row of a step is shorter."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, _RankRows] = {}

    def read(self) -> list[list[Mapping[str, Any]]]:
        """Return rows by rank; a rank's first says which attempt those after it are of, unless that is the first."""
        for rank, path in metrics_files(self._directory).items():
            self._files.setdefault(rank, _RankRows(path))
        most = self.MOST // max(len(self._files), 1)
        ranks = max(self._files, default=-1) + 1
        return [self._files[rank].read(most) if rank in self._files else [] for rank in range(ranks)]


class _RankRows:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFollower | None = None
        self._size = 0
        self._attempt: Mapping[str, Any] | None = None
        self._rows: deque[Mapping[str, Any]] = deque()

    def read(self, most: int) -> list[Mapping[str, Any]]:
        size = self._path.stat().st_size
        if self._file is None or size < self._size:
            self._begin(max(0, size - most * RecentRows.ROW_BYTES))
        self._size = size
        assert self._file is not None
        self._rows.extend(row for line in self._file.read_lines() if (row := parse_row(line)) is not None)
        while len(self._rows) > most:
            self._forget(self._rows.popleft())
        return [*([] if self._attempt is None else [self._attempt]), *self._rows]

    def _begin(self, offset: int) -> None:
        """Read on from an offset, where a line may be under way, as if what is before had been read and forgotten."""
        self._rows.clear()
        self._attempt = None
        self._file = LineFollower(self._path, offset)
        if offset:
            with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                offset = whole.rfind(b"\n", 0, offset) + 1
                self._file = LineFollower(self._path, offset)
                start = whole.rfind(b'{"event": "attempt"', 0, offset)
                if start >= 0:
                    line = whole[start : whole.find(b"\n", start)]
                    self._forget(parse_row(line.decode(errors="replace")) or {})

    def _forget(self, row: Mapping[str, Any]) -> None:
        if row.get("event") == "attempt":
            self._attempt = row
