"""Step rows as a rank writes them, without a rank."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from strategies.config.values import MonitorSettings
from strategies.telemetry.alerts import Alert
from strategies.telemetry.detectors import Watch

CURVES = Path(__file__).parent / "curves"


def step_row(step: int, **figures: Any) -> dict[str, Any]:
    """The row of the process's step `step`, counted from 0."""
    row = {"event": "step", "step": step, "global_step": step + 1, "loss": 2.0, "seconds": 1.0}
    return {**row, "samples": 4, "tokens": 256, "measured_by": None, **figures}


def curve(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a recorded training."""
    with open(CURVES / f"{name}.csv", newline="") as file:
        for step, row in enumerate(csv.DictReader(file)):
            yield step_row(step, loss=float(row["loss"]), seconds=float(row["seconds"]))


def alerts_of(rows: Iterable[dict[str, Any]], settings: MonitorSettings | None = None) -> list[Alert]:
    """Everything that a rank tells about its rows."""
    watch = Watch(settings or MonitorSettings(), rank=3)
    return [alert for row in rows for alert in watch.step(row)]
