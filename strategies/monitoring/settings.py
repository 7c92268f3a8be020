"""MonitorSettings: what is watched, how often, and from where on it is told. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Limits of one figure; None where there is none on that side."""

    above: float | None = None
    below: float | None = None


def usual_thresholds() -> dict[str, Threshold]:
    """What ends a run soon: a disk that no checkpoint fits on any more, a host without memory."""
    return {
        "disk_free_bytes": Threshold(below=float(2**30)),
        "host_memory_available_bytes": Threshold(below=float(2**29)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """`enabled` None: under `dsplan run` only. A detector whose number is 0 is off.

    The machine is looked at every `sample_seconds`. `loss_spike`: how far a loss has to rise above the highest of the
    last steps, as a part of the distance from their median to that highest. `slowdown`: step time over what it was.
    `memory_growth`: growth without a pause over what memory was. `thresholds`: limits of figures by name.
    """

    enabled: bool | None = None
    output_path: str = "logs"
    sample_seconds: float = 10.0
    loss_spike: float = 0.25
    slowdown: float = 1.5
    memory_growth: float = 0.1
    gpu: bool = True
    cpu: bool = True
    network: bool = True
    thresholds: Mapping[str, Threshold] = field(default_factory=usual_thresholds)
