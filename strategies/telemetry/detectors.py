"""What a healthy run does not do, each found in the rows of one rank. No torch, no clock: time is the sum of `seconds`.

Real runs are noisy: losses of small batches have long tails, and machines pause. Every detector therefore holds what
it sees against what the same run did before, asks for it several times in a row, and reports it once until it is over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from hardware_db.units import format_bytes, format_seconds
from strategies.config.values import MonitorSettings, Threshold
from strategies.telemetry.alerts import Alert, finite
from strategies.telemetry.metrics import WARM_UP_STEPS, is_slowed

# The last values of a series, in order.


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
        return self._sorted[len(self._sorted) // 2]

    @property
    def highest(self) -> float:
        return self._sorted[-1]


Row = Mapping[str, Any]


class Detector(ABC):
    """Looks at one step row after the other."""

    @abstractmethod
    def seen(self, row: Row) -> Alert | None:
        """The alert that begins with this row."""


class NotFinite(Detector):
    """A value that is NaN or infinite; reported again only after a finite one."""

    def __init__(self, metric: str = "loss") -> None:
        self._metric = metric
        self._is_reported = False

    def seen(self, row: Row) -> Alert | None:
        value = row.get(self._metric)
        if value is None:
            return None
        was_reported, self._is_reported = self._is_reported, not math.isfinite(value)
        if was_reported or not self._is_reported:
            return None
        return Alert(kind="not_finite", metric=self._metric, message=f"{self._metric} is {value}")


class Spikes(Detector):
    """A loss whose last `STEPS` values all lie above a limit made of those before.

    The limit is the highest of the last `WINDOW` values plus `margin` of its distance from their median, so that a loss
    with a long tail has a limit beyond its tail.
    """

    WINDOW, LEAST, STEPS = 200, 50, 3
    FLAT = 0.05
    """Least distance between median and highest, as a share of the median: a flat loss may wiggle."""

    def __init__(self, margin: float, metric: str = "loss") -> None:
        self._margin, self._metric = margin, metric
        self._before = SortedWindow(self.WINDOW)
        self._last: deque[float] = deque()
        self._is_reported = False

    def seen(self, row: Row) -> Alert | None:
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
        was_reported, self._is_reported = self._is_reported, min(self._last) > limit
        if was_reported or not self._is_reported:
            return None
        message = (
            f"{self._metric} rose to {value:.4g} and stayed above {limit:.4g} for {self.STEPS} steps; its median was"
            f" {middle:.4g}"
        )
        return Alert(kind="loss_spike", metric=self._metric, message=message, value=value, limit=limit)


class Slowdown(Detector):
    """Steps that take `ratio` times as long as before, through `RECENT` stretches of `STRETCH_SECONDS` in a row.

    A stretch counts by the median of its steps, per token or sample where those are known, so that pauses for saving,
    evaluation and garbage do not count.
    """

    STRETCH_SECONDS, RECENT, LEAST, KEPT = 10.0, 6, 6, 60

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._stretch: list[float] = []
        self._seconds = 0.0
        self._steps_per_unit = 1.0
        self._medians: deque[float] = deque(maxlen=self.KEPT + self.RECENT)
        self._is_reported = False

    def seen(self, row: Row) -> Alert | None:
        seconds = row["seconds"]
        if row["step"] < WARM_UP_STEPS or is_slowed(row):
            return None
        self._stretch.append(seconds / (row.get("tokens") or row.get("samples") or 1))
        self._seconds += seconds
        if self._seconds < self.STRETCH_SECONDS:
            return None
        self._medians.append(median(self._stretch))
        self._stretch, self._seconds = [], 0.0
        return self._judged(row)

    def _judged(self, row: Row) -> Alert | None:
        *before, _ = all_medians = list(self._medians)
        if len(all_medians) < self.LEAST + self.RECENT:
            return None
        before, recent = all_medians[: -self.RECENT], all_medians[-self.RECENT :]
        ratio = min(recent) / median(before)
        was_reported, self._is_reported = self._is_reported, ratio > self._ratio
        if was_reported or not self._is_reported:
            return None
        units = row.get("tokens") or row.get("samples") or 1
        now, then = median(recent) * units, median(before) * units
        message = (
            f"steps take {format_seconds(now)} where they took {format_seconds(then)}, for"
            f" {format_seconds(self.RECENT * self.STRETCH_SECONDS)} now"
        )
        return Alert(kind="slowdown", metric="seconds", message=message, value=now, limit=then * self._ratio)


class Creep(Detector):
    """Memory whose lowest value rose from minute to minute, `LEAST` times in a row, by `growth` of what it was and by
    `least_bytes`.

    The lowest of a minute forgets what comes and goes within a step; one minute without growth begins anew, so that a
    run that fills its caches and stops is left alone.
    """

    MINUTE_SECONDS, STEPS, LEAST = 60.0, 10, 6

    def __init__(self, metric: str, growth: float, *, least_bytes: int) -> None:
        self._metric, self._growth, self._least_bytes = metric, growth, least_bytes
        self._lowest = math.inf
        self._steps, self._seconds = 0, 0.0
        self._rising: list[float] = []
        self._is_reported = False

    def seen(self, row: Row) -> Alert | None:
        value = row.get(self._metric)
        if not value or row["step"] < WARM_UP_STEPS:
            return None
        self._lowest = min(self._lowest, value)
        self._steps, self._seconds = self._steps + 1, self._seconds + row["seconds"]
        if self._seconds < self.MINUTE_SECONDS or self._steps < self.STEPS:
            return None
        lowest, self._lowest = self._lowest, math.inf
        seconds, self._steps, self._seconds = self._seconds, 0, 0.0
        return self._judged(lowest, seconds)

    def _judged(self, lowest: float, seconds: float) -> Alert | None:
        if self._rising and lowest <= self._rising[-1]:
            self._rising, self._is_reported = [], False
        # The first and the last are enough for a chain that is longer than asked for.
        self._rising = [*self._rising, lowest]
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


class Throttled(Detector):
    """A GPU that lowers its clocks for heat or power, in `LOOKS` looks at the machine in a row."""

    LOOKS = 3

    def __init__(self) -> None:
        self._looks = 0

    def seen(self, row: Row) -> Alert | None:
        self._looks = self._looks + 1 if row.get("gpu_throttled") else 0
        if self._looks != self.LOOKS:
            return None
        known = [("gpu_temperature_celsius", "{:.0f} degrees"), ("gpu_clock_mhz", "{:.0f} MHz")]
        at = ", ".join(text.format(row[name]) for name, text in known if name in row)
        message = "the GPU lowers its clocks because it is too hot or its power fails" + (f" ({at})" if at else "")
        return Alert(kind="throttled", metric="gpu_clock_mhz", message=message, value=row.get("gpu_clock_mhz"))


# One rank's detectors and thresholds, and who is notified.


_HOST_LEAST_BYTES = 256 * 2**20
_DEVICE_LEAST_BYTES = 128 * 2**20


class Watch:
    """Looks at rows of a rank's steps and of its machine. `thresholds` may be changed while it does."""

    def __init__(self, settings: MonitorSettings, *, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self._detectors = list(_detectors(settings))
        self._hot = Throttled()
        self.thresholds = Thresholds(settings.thresholds)

    def step(self, row: Mapping[str, Any]) -> list[Alert]:
        """The alerts that begin with a step's row."""
        self._step = int(row.get("global_step", row["step"] + 1))
        found = [alert for detector in self._detectors if (alert := detector.seen(row)) is not None]
        return self._named([*found, *self.thresholds.seen(row)])

    def figures(self, row: Mapping[str, Any]) -> list[Alert]:
        """The alerts that begin with a row of other figures, of the machine or of the script."""
        found = [alert for alert in [self._hot.seen(row)] if alert is not None]
        return self._named([*found, *self.thresholds.seen(row)])

    def _named(self, alerts: list[Alert]) -> list[Alert]:
        return [replace(alert, rank=self._rank, step=self._step) for alert in alerts]


class Thresholds:
    """Figures by name against their limits; each is reported when it is crossed, and again only after it was kept."""

    def __init__(self, limits: Mapping[str, Threshold]) -> None:
        self._limits = dict(limits)
        self._crossed: set[str] = set()

    def set(self, name: str, limit: Threshold) -> None:
        """Set or replace the limits of a figure."""
        self._limits[name] = limit

    def seen(self, row: Mapping[str, Any]) -> list[Alert]:
        """The alerts that begin with these figures."""
        return [
            alert
            for name, limit in self._limits.items()
            if isinstance(value := row.get(name), (int, float)) and (alert := self._judged(name, value, limit))
        ]

    def _judged(self, name: str, value: float, limit: Threshold) -> Alert | None:
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


def _detectors(settings: MonitorSettings) -> Iterator[Detector]:
    yield NotFinite()
    if settings.loss_spike:
        yield Spikes(settings.loss_spike)
    if settings.slowdown:
        yield Slowdown(settings.slowdown)
    if settings.memory_growth:
        yield Creep("private_bytes", settings.memory_growth, least_bytes=_HOST_LEAST_BYTES)
        yield Creep("allocated_bytes", settings.memory_growth, least_bytes=_DEVICE_LEAST_BYTES)
