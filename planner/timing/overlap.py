"""What is left of communication when it runs beside compute."""

from __future__ import annotations

SLOWDOWN = 1.15
"""Compute and communication slow each other while both run: 1.1 to 1.3 measured by Galvatron's hardware profiler."""


def exposed_seconds(compute: float, communication: float, startup: float = 0.0) -> float:
    """Seconds that communication adds to compute on a second stream.

    `startup` is the part that must finish before compute can begin or that only begins when compute has ended; the rest
    hides behind compute, and both slow down while they run together.
    """
    startup = min(startup, communication)
    rest = communication - startup
    return startup + max(0.0, rest - compute) + (SLOWDOWN - 1) * min(rest, compute)
