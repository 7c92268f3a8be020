"""Watch: one rank's detectors and thresholds, and who is told. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from strategies.monitoring.alerts import Alert
from strategies.monitoring.detectors import Creep, Detector, NotFinite, Slowdown, Spikes, Throttled
from strategies.monitoring.settings import MonitorSettings, Threshold

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
    """Figures by name against their limits; each is told when it is crossed, and again only after it was kept."""

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
