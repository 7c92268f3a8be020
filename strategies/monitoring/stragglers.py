"""Stragglers: a rank that keeps the others waiting, found by comparing the rows of all ranks. No torch.

Ranks that train together end their steps together, so the seconds of a step say nothing. What a rank does alone at a
step's beginning does: `load_seconds`, until its first forward pass, and `ready_seconds`, until its first loss. Under
strategies that gather weights in the forward pass the others wait for a slow rank in there, and `ready_seconds` are
the same on all; then only slow loading shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median, median_low
from typing import Any

from hardware_db.units import format_seconds
from strategies.metrics import STORAGE_TRACKER, WARM_UP_STEPS
from strategies.monitoring.alerts import Alert

_WHAT = {"load_seconds": "reading its batch", "ready_seconds": "its forward pass"}


class Stragglers:
    """Compares ranks over windows of `STEPS` steps. A rank whose median is `RATIO` times that of the typical rank, by
    at least `SHARE` of the step, in `WINDOWS` windows in a row, is told."""

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
        if row["step"] < WARM_UP_STEPS or row.get("measured_by") == STORAGE_TRACKER:
            return []
        self._rows.setdefault(rank, []).append(row)
        if len(self._rows[rank]) > 4 * self.STEPS:
            self._begin_anew()  # some rank has ended
        if len(self._rows) < 2 or any(len(rows) < self.STEPS for rows in self._rows.values()):
            return []
        windows = {rank: rows[: self.STEPS] for rank, rows in self._rows.items()}
        self._rows = {rank: rows[self.STEPS :] for rank, rows in self._rows.items()}
        found = (self._judged(metric, windows) for metric in ("load_seconds", "ready_seconds"))
        told = [alert for alert in found if alert is not None]
        return told[:1]  # a rank that reads slowly is ready late, too

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
