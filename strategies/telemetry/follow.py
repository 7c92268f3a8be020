"""Readers of what ranks append to their metrics: last rows, and the alerts of this node. No torch."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from strategies.run_directory.files import metrics_files
from strategies.telemetry.alerts import ALERT, Alert
from strategies.telemetry.detectors import Stragglers
from strategies.telemetry.metrics import parse_row


class LineFollower:
    """Reads lines behind `offset` bytes that others append to a file, each once complete; it may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._partial = b""

    def read_lines(self, *, final: bool = False) -> list[str]:
        """Return the complete lines since the last call; with `final`, an unfinished last line as well."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                added = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *complete, self._partial = (self._partial + added).split(b"\n")
        if final and self._partial:
            complete.append(self._partial)
            self._partial = b""
        return [line.decode(errors="replace").rstrip("\r") for line in complete]


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


_LOOK_SECONDS = 1.0
"""Between two looks at the ranks' files."""
SAME_SECONDS = 60.0
"""Alerts of one kind and metric within so long are one: all ranks see the same NaN."""


class AlertFollower:
    """Gives every alert once, from here on: what was in a run directory before is not reported again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LineFollower] = {}
        self._stragglers = Stragglers()
        self._reported_at: dict[tuple[str, str], float] = {}
        self._looked = float("-inf")
        self._find()
        for file in self._files.values():
            file.read_lines()

    def read(self, *, final: bool = False) -> list[Alert]:
        """Return the alerts since the last call; looks once a second, however often it is called, and if `final`."""
        now = time.monotonic()
        if not final and now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        self._find()
        lines = {rank: file.read_lines() for rank, file in self._files.items()}
        alerts: list[Alert] = []
        # A row of each rank in turn: a follower that comes late must see ranks side by side, too.
        for turn in zip_longest(*lines.values()):
            for rank, line in zip(lines, turn, strict=True):
                if line is not None and (row := parse_row(line)) is not None:
                    alerts.extend(self._judge(rank, row))
        return [alert for alert in alerts if self._is_new(alert)]

    def _find(self) -> None:
        for rank, path in metrics_files(self._directory).items():  # ranks of a later attempt may be more
            self._files.setdefault(rank, LineFollower(path))

    def _judge(self, rank: int, row: Mapping[str, Any]) -> list[Alert]:
        event = row.get("event")
        if event == ALERT:
            return [Alert.from_row(row)]
        if event == "attempt":
            self._stragglers.begin_attempt(int(row["attempt"]))
        return self._stragglers.judge(rank, row) if event == "step" else []

    def _is_new(self, alert: Alert) -> bool:
        key = (alert.kind, alert.metric)
        before = self._reported_at.get(key)
        if before is not None and alert.time - before < SAME_SECONDS:
            return False
        self._reported_at[key] = alert.time
        return True
