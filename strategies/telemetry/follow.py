"""What ranks append to their metrics while they train: their last rows, and the alerts of this node. No torch."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import median, median_low
from typing import Any

from hardware_db.units import format_seconds
from strategies.run_directory.files import metrics_files
from strategies.telemetry.alerts import ALERT, Alert
from strategies.telemetry.metrics import WARM_UP_STEPS, is_slowed, parse_row

# Follow files that other processes append to.


class LineFollower:
    """Lines appended to a file since the last call, the first of them behind `offset` bytes. A line is given once it is
    complete; the file may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._partial = b""

    def read_lines(self, *, final: bool = False) -> list[str]:
        """New complete lines; with `final`, an unfinished last line as well."""
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
    """The last metrics rows of every rank, `MOST` of all together: what a page needs that is drawn again and again of a
    run of any length. Lines are read once, and of a long file its end alone."""

    MOST = 20_000
    ROW_BYTES = 600
    """A row of a step is shorter."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, _RankRows] = {}

    def read(self) -> list[list[Mapping[str, Any]]]:
        """By rank; the first row of a rank says which attempt those after it are of, unless that is the first."""
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
                place = whole.rfind(b'{"event": "attempt"', 0, offset)
                if place >= 0:
                    line = whole[place : whole.find(b"\n", place)]
                    self._forget(parse_row(line.decode(errors="replace")) or {})

    def _forget(self, row: Mapping[str, Any]) -> None:
        if row.get("event") == "attempt":
            self._attempt = row


# Stragglers are found by comparing the rows of all ranks.


_WHAT = {"load_seconds": "reading its batch", "ready_seconds": "its forward pass"}


class Stragglers:
    """Compares ranks over windows of `STEPS` steps. A rank whose median is `RATIO` times that of the typical rank, by
    at least `SHARE` of the step, in `WINDOWS` windows in a row, is reported."""

    STEPS, WINDOWS, RATIO, SHARE = 20, 3, 1.5, 0.1

    def __init__(self) -> None:
        self._attempt = 0
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        self._times: dict[str, tuple[int, int]] = {}

    def attempt_begins(self, attempt: int) -> None:
        """Other ranks may train from here on, under another plan; every rank says so."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._rows.clear()
        self._times.clear()

    def seen(self, rank: int, row: Mapping[str, Any]) -> list[Alert]:
        """The alerts that begin with a rank's step row."""
        if row["step"] < WARM_UP_STEPS or is_slowed(row):
            return []
        self._rows.setdefault(rank, []).append(row)
        if len(self._rows[rank]) > 4 * self.STEPS:
            self._begin_anew()  # some rank has ended
        if len(self._rows) < 2 or any(len(rows) < self.STEPS for rows in self._rows.values()):
            return []
        windows = {rank: rows[: self.STEPS] for rank, rows in self._rows.items()}
        self._rows = {rank: rows[self.STEPS :] for rank, rows in self._rows.items()}
        found = (self._judged(metric, windows) for metric in ("load_seconds", "ready_seconds"))
        reported = [alert for alert in found if alert is not None]
        return reported[:1]  # a rank that reads slowly is ready late, too

    def _judged(self, metric: str, windows: Mapping[int, list[Mapping[str, Any]]]) -> Alert | None:
        medians = {
            rank: median(row[metric] for row in rows)
            for rank, rows in windows.items()
            if all(row.get(metric) is not None for row in rows)
        }
        if len(medians) < 2:
            return None
        rank = max(medians, key=medians.__getitem__)
        slowest, typical = medians[rank], median_low(medians.values())
        step = median(row["seconds"] for row in windows[rank])
        is_late = slowest > self.RATIO * typical and slowest - typical > self.SHARE * step
        before, times = self._times.get(metric, (rank, 0))
        times = (times + 1 if rank == before else 1) if is_late else 0
        self._times[metric] = (rank, times)
        if times != self.WINDOWS:
            return None
        message = (
            f"rank {rank} takes {format_seconds(slowest)} for {_WHAT[metric]} where others take"
            f" {format_seconds(typical)}, of {format_seconds(step)} per step"
        )
        last = windows[rank][-1]
        return Alert(
            kind="straggler", metric=metric, message=message, value=slowest, limit=self.RATIO * typical, rank=rank,
            step=int(last.get("global_step", last["step"] + 1)),
        )  # fmt: skip


_LOOK_SECONDS = 1.0
SAME_SECONDS = 60.0
"""Alerts of one kind and metric within so long are one: all ranks see the same NaN."""


class AlertFollower:
    """Gives every alert once, from here on: what was in a run directory before is not reported again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LineFollower] = {}
        self._stragglers = Stragglers()
        self._report_line: dict[tuple[str, str], float] = {}
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
        for rank, path in metrics_files(self._directory).items():
            self._files.setdefault(rank, LineFollower(path))

    def _from_row(self, rank: int, row: Mapping[str, Any]) -> list[Alert]:
        event = row.get("event")
        if event == ALERT:
            return [Alert.from_row(row)]
        if event == "attempt":
            self._stragglers.attempt_begins(int(row["attempt"]))
        return self._stragglers.seen(rank, row) if event == "step" else []

    def _is_new(self, alert: Alert) -> bool:
        key = (alert.kind, alert.metric)
        before = self._report_line.get(key)
        if before is not None and alert.time - before < SAME_SECONDS:
            return False
        self._report_line[key] = alert.time
        return True
