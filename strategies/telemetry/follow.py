"""Readers of what ranks append to their metrics: lines, and the alerts of this node. No torch."""

from __future__ import annotations

import time
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
