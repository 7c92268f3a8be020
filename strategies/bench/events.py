"""What happens while a benchmark runs, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hardware_db.measurement import Measurement, RateMeasurement
from hardware_db.microbench.point import Point
from strategies.bench.case import TrainingCase

Work: TypeAlias = Point | TrainingCase


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """`total` pieces of work are wanted, `stored` of them are in the database already."""

    total: int
    stored: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """This piece of work is next."""

    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Another benchmark is measuring just now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Another benchmark measured it in the meantime."""

    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """It is measured and in the database."""

    work: Work
    record: RateMeasurement | Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """It cannot be measured here; the next call will try again."""

    work: Work
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeIsUp:
    """The minutes are over; `left` pieces of work wait for the next call."""

    left: int


Event: TypeAlias = Begun | Started | Waiting | Found | Measured | Refused | TimeIsUp
