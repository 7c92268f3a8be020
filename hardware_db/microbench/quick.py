"""The rates that a first plan on a machine needs, measured by the ranks that are about to train.

They are the first points of `dsplan bench` too (`grid.quick_points`): a machine that it measured has them already.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hardware_db.microbench.grid import CPU, GPU, quick_points
from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Rate
from hardware_db.microbench.runner import measure
from hardware_db.microbench.timer import Budget, ranks_at_work


def wanted_points(device: torch.device) -> tuple[Point, ...]:
    """What to measure with as many ranks as the live process group has."""
    return quick_points(GPU if device.type == "cuda" else CPU, ranks_at_work())


def quick_rates(points: Iterable[Point], device: torch.device) -> tuple[Rate, ...]:
    """Measure the points. All ranks call this at the same time, so that what they share (cores, memory bus) is shared
    as in training."""
    return tuple(measure(point, device, Budget()) for point in points)
