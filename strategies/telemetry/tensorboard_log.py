"""Scalars of an engine's steps for TensorBoard, CSV files and the terminal, written every few steps.

They have loss, learning rate, norms, seconds and bytes.
Figures stay where they are made until then, so that a GPU is waited for once per interval.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from hardware_db.notices import label_lines
from hardware_db.units import format_seconds
from strategies.errors import BackendMissing, CannotRun
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.metrics import group
from strategies.telemetry.monitor import RunMonitor
from strategies.telemetry.timers import Timers
from strategies.telemetry.traces import StepProfile

EVERY_STEPS = 10
"""Steps between rows where a script or its config (`steps_per_print`) does not say; DeepSpeed's default."""

Row = Mapping[str, float]
"""A step's figures by name; `step` is its number, counted from 1."""
WHOLE = "whole_step"


class Writer(ABC):
    """Writer of rows."""

    @abstractmethod
    def write(self, rows: Sequence[Row]) -> None:
        """Take the rows of an interval."""

    def close(self) -> None:  # noqa: B027
        """Close what is open; nothing, where every file is closed already."""


class StepLog(Observer):
    """Collects a row per optimizer step and hands the rows to `writers` every `every` steps.

    With `times`, seconds per section are in the last row of an interval, as means over its steps, and so is what a
    profile of that one step says of communication; the profiled step itself is in no mean. An interval of one step has
    no room for a profile.
    """

    def __init__(self, engine: TrainingEngine, writers: Sequence[Writer], *, every: int, times: bool) -> None:
        self._engine, self._writers, self._every = engine, tuple(writers), every
        self._timers = Timers(engine.device) if times else None
        self._losses: list[torch.Tensor] = []
        self._rows: list[dict[str, Any]] = []
        self._profile: StepProfile | None = None
        self._rate = 0.0
        if self._timers is not None:
            self._timers.starts(WHOLE)

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Begin the profile of an interval's last step."""
        last = len(self._rows) == self._every - 1 > 0
        if self._timers is not None and not self._losses and last and StepProfile.is_possible():
            self._profile = StepProfile(self._engine.device)
            self._profile.start()
            self._timers.forget()  # sections of this step that have ended before its forward pass

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss, on its device."""
        self._losses.append(loss.detach())

    def starts(self, section: str) -> None:
        """Start a section's timer."""
        if section == "step":
            self._rate = self._engine.get_lr()[0]  # a scheduler changes it at the end of the step
        if self._timers is not None and self._profile is None:
            self._timers.starts(section)

    def ends(self, section: str) -> None:
        """Stop a section's timer."""
        if self._timers is not None and self._profile is None:
            self._timers.ends(section)

    def step_ended(self) -> None:
        """Keep the step's row, and write those of an interval that is over."""
        engine = self._engine
        norm = engine.gradient_norm
        row: dict[str, Any] = {
            "step": engine.global_steps,
            "loss": torch.stack([loss.float() for loss in self._losses]).mean() if self._losses else None,
            "learning_rate": self._rate,
            "loss_scale": engine.loss_scale,
            **({"gradient_norm": norm} if norm is not None else {}),
            **_memory(engine.device),
        }
        self._losses = []
        self._rows.append(row)
        if self._timers is not None and self._profile is None:
            self._timers.ends(WHOLE)
        if len(self._rows) == self._every:
            self._write()
        if self._timers is not None:
            self._timers.keep()
            self._timers.starts(WHOLE)

    def close(self) -> None:
        """Write what is held back, and close the writers."""
        self._write()
        for writer in self._writers:
            writer.close()

    def _write(self) -> None:
        if not self._rows:
            return
        self._rows[-1].update(self._seconds())
        rows = [{name: float(value) for name, value in row.items() if value is not None} for row in self._rows]
        self._rows = []
        for writer in self._writers:
            writer.write(rows)

    def _seconds(self) -> dict[str, float]:
        """Return mean seconds per step of the interval's sections, and the communication of its last step."""
        if self._timers is None:
            return {}
        profile, self._profile = self._profile, None
        steps = len(self._rows) - (profile is not None)
        figures = {f"{name}_seconds": seconds / max(1, steps) for name, seconds in self._timers.take().items()}
        if profile is None:
            return figures
        sent = profile.stop()
        own = {"communication_seconds": sent.seconds, "exposed_communication_seconds": sent.exposed_seconds}
        return {**figures, **own}


def _memory(device: torch.device) -> dict[str, int]:
    """Return bytes that tensors have and had at most, as far as the device counts them, and this process's memory."""
    resident = {"host_bytes": psutil.Process().memory_info().rss}
    if device.type != "cuda":
        return resident
    return {
        **resident,
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "peak_bytes": torch.cuda.max_memory_allocated(device),
    }


class TensorboardWriter(Writer):
    """Event files of rank 0, through a `SummaryWriter`, which is closed with the log where it is the log's own."""

    def __init__(self, events: Any, *, owned: bool = False) -> None:
        self._events, self._owned = events, owned

    @classmethod
    def in_directory(cls, directory: Path) -> TensorboardWriter:
        """Return a writer of its own.

        Raises:
            BackendMissing: the package is not installed.
        """
        try:
            kind: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise BackendMissing(
                "config: tensorboard.enabled needs the package tensorboard; pip install dsplan[tensorboard], or use"
                " csv_monitor"
            ) from None
        return cls(kind(log_dir=str(directory)), owned=True)

    def write(self, rows: Sequence[Row]) -> None:
        """Add every figure of every row."""
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    self._events.add_scalar(group(name), value, int(row["step"]))
        self._events.flush()

    def close(self) -> None:
        """Close the `SummaryWriter` where it is the log's own."""
        if self._owned:
            self._events.close()


def scalar_log(engine: TrainingEngine, writer: Any, *, every: int) -> StepLog:
    """Return a log of an engine's steps that goes to a `SummaryWriter` or anything with its `add_scalar` and `flush`.

    Raises:
        CannotRun: it has not got them, or `every` is below 1.
    """
    if not (callable(getattr(writer, "add_scalar", None)) and callable(getattr(writer, "flush", None))):
        raise CannotRun(f"set_tensorboard_writer: {type(writer).__name__} has no add_scalar; give a SummaryWriter")
    if every < 1:
        raise CannotRun(f"set_tensorboard_writer: every is {every}; it must be at least 1")
    return StepLog(engine, [TensorboardWriter(writer)], every=every, times=True)


class CsvWriter(Writer):
    """A file per figure, of lines `step,value`; a run that continues in the same directory continues in its files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def write(self, rows: Sequence[Row]) -> None:
        """Append to the figures' files."""
        for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
            path = self._directory / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with open(path, "a", newline="") as file:
                lines = csv.writer(file)
                if is_new:
                    lines.writerow(("step", name))
                lines.writerows((int(row["step"]), row[name]) for row in rows if name in row)


class Console(Writer):
    """A line per interval on rank 0's terminal: where the step is, and where its time went."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def write(self, rows: Sequence[Row]) -> None:
        """Show the last row."""
        self._show(_line(rows[-1]))


def _line(row: Row) -> str:
    parts = [label_lines(f"step {row['step']:.0f}")]
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


class MetricsWriter(Writer):
    """The metrics of `dsplan run`, of every rank."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def write(self, rows: Sequence[Row]) -> None:
        """Write the last row; the monitor is closed by its engine."""
        self._monitor.figures(rows[-1])
