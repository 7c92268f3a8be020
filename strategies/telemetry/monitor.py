"""Measurements of a run by itself: a line of JSON per rank and optimizer step, looks at the machine, alerts.

`strategies/telemetry/metrics.py` has the lines.
"""

from __future__ import annotations

import atexit
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from strategies.config.values import MonitorSettings
from strategies.protocols import Observer
from strategies.telemetry.alerts import Alert
from strategies.telemetry.detectors import Watch
from strategies.telemetry.machine import SAMPLE_SECONDS, Figures, MachineReader, Sampler
from strategies.telemetry.metrics import MetricsFile, summarise
from strategies.telemetry.step_profile import RunProfile
from strategies.telemetry.step_rows import LOOK_SECONDS, StepRows


class Recorder(ABC):
    """One rank's metrics file, the thread that looks at its machine, and the detectors; without `settings` the file."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        file: MetricsFile | None,
        settings: MonitorSettings | None,
    ) -> None:
        self._file, self._machine = file, Figures()
        self._watch: Watch | None = None
        self._sampler: Sampler | None = None
        if settings is not None:
            self._watch = Watch(settings, rank=rank)
            whole_node = is_first_here()
            reader = MachineReader(settings, gpu_uuid=gpu_uuid(device), directory=directory, whole_node=whole_node)
            seconds = SAMPLE_SECONDS if settings.sample_seconds is None else settings.sample_seconds
            self._sampler = Sampler(reader, seconds, self._take_figures)
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread, write what is held back and close the file; later calls do nothing."""
        if self._sampler is not None:
            self._sampler.close()
        self._finish()
        if self._file is not None:
            self._file.close()
        atexit.unregister(self.close)

    @abstractmethod
    def _finish(self) -> None:
        """Write what is held back."""

    @abstractmethod
    def _notify(self, alert: Alert) -> None:
        """Pass on an alert that was written."""

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(row)

    def _take_figures(self, figures: Figures) -> None:
        """Write a look at the machine; called in the sampler's thread."""
        self._machine = figures
        self._write({"event": "machine", "time": time.time(), **figures})
        if self._watch is not None:
            self._take_alerts(self._watch.figures(figures))

    def _take_alerts(self, alerts: list[Alert]) -> None:
        """Report alerts about the machine; called in the sampler's thread."""
        self._report(alerts)

    def _report(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._write(alert.to_row())
            self._notify(alert)


class RunMonitor(Recorder, Observer):
    """Writes one rank's metrics while the engine trains. `close` writes the summary; leaving Python does it too.

    Steps over all attempts are reported to `step_ended`, or by what `training_starts` was given; else they are counted
    here. Unless `settings` say no, the machine is looked at in a thread of its own and alerts are written,
    and given to `on_alert`, from either thread.
    """

    _file: MetricsFile

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        sequence_length: int,
        sharing: int = 1,
        settings: MonitorSettings | None = None,
        on_alert: Callable[[Alert], object] | None = None,
    ) -> None:
        self._on_alert = on_alert
        self._rows = StepRows(device, sequence_length=sequence_length, sharing=sharing)
        self._profile = RunProfile.from_environment(directory, rank, device)
        self._unseen: list[Mapping[str, Any]] = []
        self._look_at = 0.0
        file, chosen = MetricsFile(directory, rank), settings or MonitorSettings()
        self._following, self._is_profiled = 0 if file.attempt else 1, False
        watched = None if chosen.enabled is False else chosen
        super().__init__(directory, rank=rank, device=device, file=file, settings=watched)

    def plan_made(self, plan: Mapping[str, Any]) -> None:
        """Write the plan that was made, before anything is built by it: memory may run out there."""
        self._write({"event": "plan", **plan})

    def training_starts(self, global_steps: Callable[[], int] | None = None) -> None:
        """Begin the first step: all is built. `global_steps` gives the steps over all attempts once a step is over."""
        if global_steps is not None:
            self._following = global_steps() + 1
        self._begin_profile()
        self._rows.begin(global_steps)

    def _begin_profile(self) -> None:
        """Begin to profile a step where it is time to; its number is 0 where that shows at its end alone."""
        if self._profile is not None and self._following:
            self._is_profiled = self._profile.step_begins(self._following)

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Begin a micro-batch."""
        self._rows.forward_starts(module, inputs)

    def memory_starts(self, weights: Iterable[torch.Tensor]) -> None:
        """Measure the memory, of which `weights` are a part, of a step whose forward passes nobody reports."""
        self._rows.memory_starts(weights)

    def loss_is(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss; it stays on the device until the step ends."""
        self._rows.loss_is(loss)

    def step_ended(self, global_step: int | None = None) -> None:
        """Write the row of an optimizer step, the `global_step`th over all attempts."""
        row = self._rows.step_ended(global_step)
        if self._profile is not None:
            row |= {"profiled": True} if self._is_profiled else {}
            self._profile.step_ended(row["global_step"])
            self._following = row["global_step"] + 1
            self._begin_profile()
            self._rows.restart_clock()
        self._write(row)
        self._unseen.append(row)
        if time.monotonic() >= self._look_at:
            self._look()

    def figures(self, row: Mapping[str, float]) -> None:
        """Write the step log's figures of its last interval."""
        self._write({"event": "figures", **row})

    def _finish(self) -> None:
        """Write the summary."""
        if self._profile is not None:
            self._profile.close()
        self._look()
        if self._file.is_open:
            self._rows.close()
            self._write({"event": "end", **asdict(summarise([self._file.own_rows()]))})

    def _look(self) -> None:
        """Judge the rows that came since the last look: many at once take hardly longer than one."""
        rows, self._unseen = self._unseen, []
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self._watch is not None:
            for row in rows:
                self._report(self._watch.step(row))

    def _notify(self, alert: Alert) -> None:
        if self._on_alert is not None:
            self._on_alert(alert)


def gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a GPU, or of the MIG slice that this process has of it; None for a CPU."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def is_first_here() -> bool:
    """Return whether this is the rank that looks at the whole node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
