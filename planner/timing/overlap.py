"""What is left of communication when it runs beside compute."""

from __future__ import annotations

SLOWDOWN = 1.15
"""Compute and communication slow each other while both run: 1.1 to 1.3 measured by Galvatron's hardware profiler."""

SERIAL_SLOWDOWN = 2.0
"""The same on CPUs, where both run on the same cores: what one gets, the other waits for."""


def beside(compute: float, communication: float, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute that starts with it; `slowdown` holds while both run."""
    if communication > compute:
        return communication - compute + (slowdown - 1) * compute
    return (slowdown - 1) * communication


def exposed_seconds(compute: float, communication: float, startup: float = 0.0, slowdown: float = SLOWDOWN) -> float:
    """Seconds that communication adds to compute on a second stream.

    `startup` is the part that must finish before compute can begin or that only begins when compute has ended; the rest
    runs beside compute.
    """
    startup = min(startup, communication)
    return startup + beside(compute, communication - startup, slowdown)
