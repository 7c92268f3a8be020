"""Where a log's rows go: TensorBoard's event files, CSV, the terminal, or the metrics of `dsplan run`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware_db.units import format_seconds
from strategies.errors import BackendMissing
from strategies.monitor import RunMonitor
from strategies.step_log import WHOLE, Row

_GROUPS = {"seconds": "seconds", "bytes": "memory"}


class TensorboardWriter:
    """Event files of rank 0.

    Raises:
        BackendMissing: the package is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            kind: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise BackendMissing(
                "config: tensorboard.enabled needs the package tensorboard; pip install dsplan[tensorboard], or use"
                " csv_monitor"
            ) from None
        self._events: Any = kind(log_dir=str(directory))

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    group = _GROUPS.get(name.rpartition("_")[2], "train")
                    self._events.add_scalar(f"{group}/{name}", value, int(row["step"]))
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class CsvWriter:
    """A file per figure, of lines `step,value`; a run that goes on in the same directory goes on in its files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def write(self, rows: Sequence[Row]) -> None:
        for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
            path = self._directory / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with open(path, "a", newline="") as file:
                lines = csv.writer(file)
                if is_new:
                    lines.writerow(("step", name))
                lines.writerows((int(row["step"]), row[name]) for row in rows if name in row)

    def close(self) -> None:
        """Every file is closed already."""


class Console:
    """A line per interval on rank 0's terminal: where the step is, and where its time went."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def write(self, rows: Sequence[Row]) -> None:
        self._show(line_of(rows[-1]))

    def close(self) -> None:
        """Nothing is held back."""


def line_of(row: Row) -> str:
    """A row as a line."""
    parts = [f"dsplan: step {row['step']:.0f}"]
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4g}")
    parts.append(f"lr {row['learning_rate']:.3g}")
    seconds = {name.removesuffix("_seconds"): value for name, value in row.items() if name.endswith("_seconds")}
    whole, sent, exposed = (seconds.pop(name, None) for name in (WHOLE, "communication", "exposed_communication"))
    if whole is not None:
        parts.append(f"{format_seconds(whole)} per step")
    parts.extend(f"{name} {format_seconds(value)}" for name, value in seconds.items())
    if sent is not None and exposed is not None:
        parts.append(f"communication {format_seconds(sent)}, {format_seconds(exposed)} of it exposed")
    return ", ".join(parts)


class MetricsWriter:
    """The metrics of `dsplan run`, of every rank."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def write(self, rows: Sequence[Row]) -> None:
        self._monitor.figures(rows[-1])

    def close(self) -> None:
        """The monitor is closed by its engine."""
