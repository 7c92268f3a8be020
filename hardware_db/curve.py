"""Curve: measured seconds over the size of the work, which is what every micro-benchmark yields."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points of (work, seconds), work ascending: FLOPs, bytes or parameters.

    Between two points seconds follow the straight line, a latency and a rate. Less work than the first point takes the
    first point's seconds, more than the last runs at the last point's rate; a point alone is a rate at every size.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, work: float) -> float:
        """Seconds that `work` takes."""
        points = self.points
        last_work, last_seconds = points[-1]
        if work >= last_work or len(points) == 1:
            return last_seconds * work / last_work
        above = bisect_left(points, (work, 0.0))
        if above == 0:
            return points[0][1]
        (low, low_seconds), (high, high_seconds) = points[above - 1], points[above]
        return low_seconds + (high_seconds - low_seconds) * (work - low) / (high - low)

    def rate(self, work: float) -> float:
        """Work per second at this size."""
        return work / self.seconds(work)


def constant_rate(rate: float) -> Curve:
    """A curve of one rate at every size, without latency."""
    return Curve(points=((1.0, 1.0 / rate),))


def curve_of(points: Iterable[tuple[float, float]]) -> Curve | None:
    """The curve through points in any order; the first of equal work counts, none at all make no curve.

    Less work takes no more time: where a point says otherwise something else ran beside it, and a later point counts.
    """
    found: dict[float, float] = {}
    for work, seconds in points:
        if work > 0 and seconds > 0:
            found.setdefault(work, seconds)
    least, points = math.inf, []
    for work, seconds in sorted(found.items(), reverse=True):
        least = min(least, seconds)
        points.append((work, least))
    return Curve(points=tuple(reversed(points))) if points else None
