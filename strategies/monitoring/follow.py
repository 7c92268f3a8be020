"""AlertFollower: what the ranks of this node have to tell, read from their metrics while they train. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from strategies.launch.tail import LineFollower
from strategies.metrics import parse_row
from strategies.monitoring.alerts import ALERT, Alert
from strategies.monitoring.stragglers import Stragglers

_METRICS = re.compile(r"metrics-rank(\d+)\.jsonl")
_LOOK_SECONDS = 1.0
SAME_SECONDS = 60.0
"""Alerts of one kind and metric within so long are one: all ranks see the same NaN."""


class AlertFollower:
    """Gives every alert once, from here on: what was in a run directory before is told no more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LineFollower] = {}
        self._stragglers = Stragglers()
        self._told: dict[tuple[str, str], float] = {}
        self._looked = float("-inf")
        self._find()
        for file in self._files.values():
            file.read_lines()

    def read(self, *, final: bool = False) -> list[Alert]:
        """The alerts since the last call. Looks once a second, however often it is called, and where it is `final`."""
        now = time.monotonic()
        if not final and now - self._looked < _LOOK_SECONDS:
            return []
        self._looked = now
        self._find()
        lines = {rank: file.read_lines() for rank, file in self._files.items()}
        found: list[Alert] = []
        # A row of each rank in turn: a follower that comes late must see ranks side by side, too.
        for turn in zip_longest(*lines.values()):
            for rank, line in zip(lines, turn, strict=True):
                if line is not None and (row := parse_row(line)) is not None:
                    found.extend(self._from_row(rank, row))
        return [alert for alert in found if self._is_new(alert)]

    def _find(self) -> None:
        """Ranks of a later attempt may be more."""
        for path in self._directory.glob("metrics-rank*.jsonl"):
            if match := _METRICS.fullmatch(path.name):
                self._files.setdefault(int(match[1]), LineFollower(path))

    def _from_row(self, rank: int, row: Mapping[str, Any]) -> list[Alert]:
        event = row.get("event")
        if event == ALERT:
            return [Alert.from_row(row)]
        if event == "attempt":
            self._stragglers.attempt_begins(int(row["attempt"]))
        return self._stragglers.seen(rank, row) if event == "step" else []

    def _is_new(self, alert: Alert) -> bool:
        key = (alert.kind, alert.metric)
        before = self._told.get(key)
        if before is not None and alert.time - before < SAME_SECONDS:
            return False
        self._told[key] = alert.time
        return True
