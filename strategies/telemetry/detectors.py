"""Detectors of what a healthy run does not do, in rows of metrics. No torch, no clock: time is the sum of `seconds`.

Real runs are noisy: losses of small batches have long tails, and machines pause. Every detector therefore holds what
it sees against what the same run did before, asks for it several times in a row, and reports it once until it is over.

Defaults and limits of all detectors stand here. They were chosen so that the recorded trainings of
`tests/strategies/telemetry/curves` raise no alert and the faults put into them do; a config's section `monitor`
replaces those that `MonitorSettings` has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median, median_low
from typing import Any

from hardware_db.units import format_bytes, format_seconds
from strategies.config.values import MonitorSettings, Threshold
from strategies.telemetry.alerts import Alert, finite
from strategies.telemetry.metrics import WARM_UP_STEPS, is_slowed

LOSS_SPIKE_MARGIN = 0.25
"""`loss_spike`: a spike lies above the highest of the last losses by this part of its distance from their median."""
SLOWDOWN_RATIO = 1.5
"""`slowdown`: step time over what it was before."""
MEMORY_GROWTH = 0.1
"""`memory_growth`: growth without a pause, as a part of what memory was."""
HOST_GROWTH_BYTES = 256 * 2**20
"""Less growth of a process's own memory is no creep."""
DEVICE_GROWTH_BYTES = 128 * 2**20
"""Less growth of a GPU's allocated memory is no creep."""
USUAL_THRESHOLDS: Mapping[str, Threshold] = {
    "disk_free_bytes": Threshold(below=float(2**30)),
    "host_memory_available_bytes": Threshold(below=float(2**29)),
}
"""What ends a run soon: a disk that no checkpoint fits on any more, a host without memory."""

Row = Mapping[str, Any]


class SortedWindow:
    """The last `size` values, with their median and their highest in a few microseconds."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Add a finite value; the oldest of a full window leaves."""
        if len(self._arrived) == self._size:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The middle value; the upper one of two."""
        return self._sorted[len(self._sorted) // 2]

    @property
    def highest(self) -> float:
        """The largest value."""
        return self._sorted[-1]


class Detector(ABC):
    """Looks at one step row after the other."""

    _is_reported = False

    @abstractmethod
    def judge(self, row: Row) -> Alert | None:
        """Return the alert that begins with this row."""

    def _begins(self, is_so: bool) -> bool:
        """Return whether what is detected begins now, and note whether it is so."""
        was_so, self._is_reported = self._is_reported, is_so
        return is_so and not was_so


class _NotFinite(Detector):
    """A value that is NaN or infinite; reported again only after a finite one."""

    def __init__(self, metric: str) -> None:
        self._metric = metric

    def judge(self, row: Row) -> Alert | None:
        value = row.get(self._metric)
        if value is None or not self._begins(not math.isfinite(value)):
            return None
        return Alert(kind="not_finite", metric=self._metric, message=f"{self._metric} is {value}")


class _Spikes(Detector):
    """A loss whose last `STEPS` values all lie above a limit made of those before.

    The limit is the highest of the last `WINDOW` values plus `margin` of its distance from their median, so that a loss
    with a long tail has a limit beyond its tail.
    """

    WINDOW, LEAST, STEPS = 200, 50, 3
    FLAT = 0.05
    """Least distance between median and highest, as a share of the median: a flat loss may wiggle."""

    def __init__(self, margin: float, metric: str) -> None:
        self._margin, self._metric = margin, metric
        self._before = SortedWindow(self.WINDOW)
        self._last: deque[float] = deque()

    def judge(self, row: Row) -> Alert | None:
        value = row.get(self._metric)
        if value is None or not math.isfinite(value):
            return None
        self._last.append(value)
        if len(self._last) <= self.STEPS:
            return None
        self._before.add(self._last.popleft())
        if len(self._before) < self.LEAST:
            return None
        middle, highest = self._before.median, self._before.highest
        limit = highest + self._margin * max(highest - middle, self.FLAT * abs(middle))
        if not self._begins(min(self._last) > limit):
            return None
        message = (
            f"{self._metric} rose to {value:.4g} and stayed above {limit:.4g} for {self.STEPS} steps; its median was"
            f" {middle:.4g}"
        )
        return Alert(kind="loss_spike", metric=self._metric, message=message, value=value, limit=limit)


class _Slowdown(Detector):
    """Steps that take `ratio` times as long as before, through `RECENT` stretches of `STRETCH_SECONDS` in a row.

    A stretch counts by the median of its steps, per token or sample where those are known, so that pauses for saving,
    evaluation and garbage do not count.
    """

    STRETCH_SECONDS, RECENT, LEAST, KEPT = 10.0, 6, 6, 60

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._stretch: list[float] = []
        self._seconds = 0.0
        self._medians: deque[float] = deque(maxlen=self.KEPT + self.RECENT)

    def judge(self, row: Row) -> Alert | None:
        if row["step"] < WARM_UP_STEPS or is_slowed(row):
            return None
        units = row.get("tokens") or row.get("samples") or 1
        self._stretch.append(row["seconds"] / units)
        self._seconds += row["seconds"]
        if self._seconds < self.STRETCH_SECONDS:
            return None
        self._medians.append(median(self._stretch))
        self._stretch, self._seconds = [], 0.0
        if len(self._medians) < self.LEAST + self.RECENT:
            return None
        medians = list(self._medians)
        before, recent = median(medians[: -self.RECENT]), medians[-self.RECENT :]
        if not self._begins(min(recent) / before > self._ratio):
            return None
        now, then = median(recent) * units, before * units
        message = (
            f"steps take {format_seconds(now)} where they took {format_seconds(then)}, for"
            f" {format_seconds(self.RECENT * self.STRETCH_SECONDS)} now"
        )
        return Alert(kind="slowdown", metric="seconds", message=message, value=now, limit=then * self._ratio)


class _Creep(Detector):
    """Memory whose lowest value of a minute rose `LEAST` times in a row, by `growth` of what it was and `least_bytes`.

    The lowest of a minute forgets what comes and goes within a step; one minute without growth begins anew, so that a
    run that fills its caches and stops is left alone.
    """

    MINUTE_SECONDS, STEPS, LEAST = 60.0, 10, 6

    def __init__(self, metric: str, growth: float, *, least_bytes: int) -> None:
        self._metric, self._growth, self._least_bytes = metric, growth, least_bytes
        self._lowest = math.inf
        self._steps, self._seconds = 0, 0.0
        self._rising: list[float] = []

    def judge(self, row: Row) -> Alert | None:
        value = row.get(self._metric)
        if not value or row["step"] < WARM_UP_STEPS:
            return None
        self._lowest = min(self._lowest, value)
        self._steps, self._seconds = self._steps + 1, self._seconds + row["seconds"]
        if self._seconds < self.MINUTE_SECONDS or self._steps < self.STEPS:
            return None
        lowest, self._lowest = self._lowest, math.inf
        seconds, self._steps, self._seconds = self._seconds, 0, 0.0
        return self._judge_minute(lowest, seconds)

    def _judge_minute(self, lowest: float, seconds: float) -> Alert | None:
        if self._rising and lowest <= self._rising[-1]:
            self._rising, self._is_reported = [], False
        self._rising.append(lowest)
        first, grown = self._rising[0], lowest - self._rising[0]
        limit = first + max(self._growth * first, self._least_bytes)
        if self._is_reported or len(self._rising) <= self.LEAST or lowest < limit:
            return None
        self._is_reported = True
        rate = grown / (len(self._rising) - 1) / seconds * 60
        message = (
            f"{self._metric.removesuffix('_bytes').replace('_', ' ')} memory grew from {format_bytes(int(first))} to"
            f" {format_bytes(int(lowest))} without a pause, {format_bytes(int(rate))} a minute"
        )
        return Alert(kind="memory_creep", metric=self._metric, message=message, value=finite(lowest), limit=limit)


class _Throttled(Detector):
    """A GPU that lowers its clocks for heat or power, in `LOOKS` looks at the machine in a row."""

    LOOKS = 3

    def __init__(self) -> None:
        self._looks = 0

    def judge(self, row: Row) -> Alert | None:
        self._looks = self._looks + 1 if row.get("gpu_throttled") else 0
        if self._looks != self.LOOKS:
            return None
        texts = [("gpu_temperature_celsius", "{:.0f} degrees"), ("gpu_clock_mhz", "{:.0f} MHz")]
        at = ", ".join(text.format(row[name]) for name, text in texts if name in row)
        message = "the GPU lowers its clocks because it is too hot or its power fails" + (f" ({at})" if at else "")
        return Alert(kind="throttled", metric="gpu_clock_mhz", message=message, value=row.get("gpu_clock_mhz"))


def metric_detectors(settings: MonitorSettings, metric: str) -> list[Detector]:
    """Return what looks at one metric's values: all must be finite, and a loss must not spike."""
    margin = LOSS_SPIKE_MARGIN if settings.loss_spike is None else settings.loss_spike
    return [_NotFinite(metric), *([_Spikes(margin, metric)] if margin and "loss" in metric else [])]


def _step_detectors(settings: MonitorSettings) -> Iterator[Detector]:
    yield from metric_detectors(settings, "loss")
    if ratio := SLOWDOWN_RATIO if settings.slowdown is None else settings.slowdown:
        yield _Slowdown(ratio)
    if growth := MEMORY_GROWTH if settings.memory_growth is None else settings.memory_growth:
        yield _Creep("private_bytes", growth, least_bytes=HOST_GROWTH_BYTES)
        yield _Creep("allocated_bytes", growth, least_bytes=DEVICE_GROWTH_BYTES)


class Watch:
    """Looks at rows of a rank's steps and of its machine. `thresholds` may be changed while it does."""

    def __init__(self, settings: MonitorSettings, *, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self._detectors = list(_step_detectors(settings))
        self._throttled = _Throttled()
        self.thresholds = Thresholds(settings.thresholds)

    def step(self, row: Row) -> list[Alert]:
        """Return the alerts that begin with a step's row."""
        self._step = int(row.get("global_step", row["step"] + 1))
        return self._judge(self._detectors, row)

    def figures(self, row: Row) -> list[Alert]:
        """Return the alerts that begin with a row of other figures, of the machine or of the script."""
        return self._judge([self._throttled], row)

    def _judge(self, detectors: list[Detector], row: Row) -> list[Alert]:
        alerts = [alert for detector in detectors if (alert := detector.judge(row)) is not None]
        return [replace(alert, rank=self._rank, step=self._step) for alert in [*alerts, *self.thresholds.judge(row)]]


class Thresholds:
    """Figures by name against their limits; each is reported when it is crossed, and again only after it was kept."""

    def __init__(self, limits: Mapping[str, Threshold]) -> None:
        self._limits = {**USUAL_THRESHOLDS, **limits}
        self._crossed: set[str] = set()

    def set(self, name: str, limit: Threshold) -> None:
        """Set or replace the limits of a figure."""
        self._limits[name] = limit

    def judge(self, row: Row) -> list[Alert]:
        """Return the alerts that begin with these figures."""
        return [
            alert
            for name, limit in self._limits.items()
            if isinstance(value := row.get(name), (int, float)) and (alert := self._judge_figure(name, value, limit))
        ]

    def _judge_figure(self, name: str, value: float, limit: Threshold) -> Alert | None:
        is_above = limit.above is not None and value > limit.above
        is_below = limit.below is not None and value < limit.below
        if not (is_above or is_below):
            self._crossed.discard(name)
            return None
        if name in self._crossed:
            return None
        self._crossed.add(name)
        side, bound = ("above", limit.above) if is_above else ("below", limit.below)
        message = f"{name} is {value:.6g}, {side} its threshold {bound:.6g}"
        return Alert(kind="threshold", metric=name, message=message, value=float(value), limit=bound)


_WAITED_FOR = {"load_seconds": "reading its batch", "ready_seconds": "its forward pass"}


class Stragglers:
    """Compares the rows of all ranks over windows of `STEPS` steps, and reports a rank that keeps the others waiting.

    That is one whose median is `RATIO` times that of the typical rank, by at least `SHARE` of the step, in `WINDOWS`
    windows in a row.
    """

    STEPS, WINDOWS, RATIO, SHARE = 20, 3, 1.5, 0.1

    def __init__(self) -> None:
        self._attempt = 0
        self._rows: dict[int, list[Row]] = {}
        self._times: dict[str, tuple[int, int]] = {}

    def begin_attempt(self, attempt: int) -> None:
        """Begin anew where an attempt is another: other ranks may train, under another plan; every rank says so."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._rows.clear()
        self._times.clear()

    def judge(self, rank: int, row: Row) -> list[Alert]:
        """Return the alerts that begin with a rank's step row."""
        if row["step"] < WARM_UP_STEPS or is_slowed(row):
            return []
        self._rows.setdefault(rank, []).append(row)
        if len(self._rows[rank]) > 4 * self.STEPS:
            self._begin_anew()  # some rank has ended
        if len(self._rows) < 2 or any(len(rows) < self.STEPS for rows in self._rows.values()):
            return []
        windows = {rank: rows[: self.STEPS] for rank, rows in self._rows.items()}
        self._rows = {rank: rows[self.STEPS :] for rank, rows in self._rows.items()}
        alerts = [self._judge_windows(metric, windows) for metric in _WAITED_FOR]
        return [alert for alert in alerts if alert is not None][:1]  # a rank that reads slowly is ready late, too

    def _judge_windows(self, metric: str, windows: Mapping[int, list[Row]]) -> Alert | None:
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
            f"rank {rank} takes {format_seconds(slowest)} for {_WAITED_FOR[metric]} where others take"
            f" {format_seconds(typical)}, of {format_seconds(step)} per step"
        )
        last = windows[rank][-1]
        return Alert(
            kind="straggler", metric=metric, message=message, value=slowest, limit=self.RATIO * typical, rank=rank,
            step=int(last.get("global_step", last["step"] + 1)),
        )  # fmt: skip
