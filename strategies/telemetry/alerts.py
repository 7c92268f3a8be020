"""Alert: something about a run that somebody should look at. No torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.notices import notice
from strategies.run_directory.files import metrics_path
from strategies.run_directory.journal import append_line
from strategies.variables import RUN_DIRECTORY

AlertKind = Literal[
    "not_finite",  # a loss or a metric is NaN or infinite
    "loss_spike",  # the loss jumped far above all it was lately, and stayed there
    "slowdown",  # steps take much longer than they did
    "memory_creep",  # memory rises from minute to minute
    "straggler",  # one rank keeps the others waiting
    "throttled",  # a GPU lowers its clocks because it is too hot or its power fails
    "checkpoint",  # a checkpoint could not be written
    "threshold",  # a figure crossed the limit that was set for it
]
ALERT = "alert"
"""`event` of an alert's row in the metrics and in the journal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One alert, reported once when it begins."""

    kind: AlertKind
    metric: str
    message: str
    value: float | None = None
    """What was seen of `metric`; None if that is no finite number."""
    limit: float | None = None
    """What it was held against."""
    step: int = 0
    """The global step."""
    rank: int = 0
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    def to_row(self) -> dict[str, Any]:
        """Return it as a line of the metrics or of the journal."""
        return {"event": ALERT, **asdict(self)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Alert:
        """Return the alert that `to_row` wrote."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})

    def line(self) -> str:
        """Return it as a line for the terminal."""
        return f"alert: rank {self.rank}, step {self.step}: {self.message}"


def finite(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None


def post(alert: Alert) -> None:
    """Append an alert of this rank to its metrics, for `dsplan run`; print it where none watches, or writing fails."""
    rank = int(os.environ.get("RANK", "0"))
    reported = replace(alert, rank=rank)
    directory = os.environ.get(RUN_DIRECTORY)
    try:
        if not directory:
            raise FileNotFoundError(RUN_DIRECTORY)
        append_line(metrics_path(Path(directory), rank), (json.dumps(reported.to_row()) + "\n").encode())
    except OSError:
        notice(reported.line())
