"""What a run measures about itself: one line of JSON per rank and optimizer step, as `strategies/telemetry/metrics.py`
says, one per look at the machine, and one per alert."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from strategies.config.values import MonitorSettings
from strategies.protocols import Observer
from strategies.telemetry.alerts import Alert
from strategies.telemetry.detectors import Watch
from strategies.telemetry.machine import Figures, MachineReader, Sampler
from strategies.telemetry.metrics import MetricsFile, summarise
from strategies.telemetry.step_profile import RunProfile
from strategies.telemetry.step_rows import StepRows

_LOOK_SECONDS = 0.5


class RunMonitor(Observer):
    """Writes one rank's metrics while the engine trains. `close` writes the summary; leaving Python does it too.

    Steps over all attempts are reported to `step_ended`, or by what `training_starts` was given; else they are counted
    here. Unless `settings` say no, the machine is looked at in a thread of its own and alerts are written,
    and given to `on_alert`, from either thread.
    """

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
        chosen = settings or MonitorSettings()
        self._file = MetricsFile(directory, rank)
        self._rows = StepRows(device, sequence_length=sequence_length, sharing=sharing)
        self._profile = RunProfile.asked(directory, rank, device)
        self._following, self._is_profiled = 0 if self._file.attempt else 1, False
        self._watch: Watch | None = None
        self._sampler: Sampler | None = None
        self._unseen: list[Mapping[str, Any]] = []
        self._look_at = 0.0
        if chosen.enabled is not False:
            self._watch = Watch(chosen, rank=rank)
            reader = MachineReader(chosen, gpu_uuid=gpu_uuid(device), directory=directory, whole_node=is_first_here())
            self._sampler = Sampler(reader, chosen.sample_seconds, self._machine)
        atexit.register(self.close)

    def plan_made(self, plan: Mapping[str, Any]) -> None:
        """Write the plan that was made, before anything is built by it: memory may run out there."""
        self._file.write({"event": "plan", **plan})

    def training_starts(self, global_steps: Callable[[], int] | None = None) -> None:
        """All is built: the first step begins. `global_steps` gives the steps over all attempts once a step is over."""
        if global_steps is not None:
            self._following = global_steps() + 1
        self._profile_begins()
        self._rows.begin(global_steps)

    def _profile_begins(self) -> None:
        """A step begins; its number is 0 where that shows at its end alone."""
        if self._profile is not None and self._following:
            self._is_profiled = self._profile.step_begins(self._following)

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """A micro-batch begins."""
        self._rows.forward_starts(module, inputs)

    def memory_starts(self, weights: Iterable[torch.Tensor]) -> None:
        """A step begins whose forward passes nobody reports: measure its memory, of which `weights` are a part."""
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
            self._profile_begins()
            self._rows.restart_clock()
        self._file.write(row)
        self._unseen.append(row)
        if time.monotonic() >= self._look_at:
            self._look()

    def figures(self, row: Mapping[str, float]) -> None:
        """Write what the step log found in its last interval."""
        self._file.write({"event": "figures", **row})

    def close(self) -> None:
        """Write the summary and close the file; later calls do nothing."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._profile is not None:
            self._profile.close()
        self._look()
        if self._file.is_open:
            self._rows.close()
            self._file.write({"event": "end", **asdict(summarise([self._file.own_rows()]))})
            self._file.close()
        atexit.unregister(self.close)

    def _look(self) -> None:
        """Judge the rows that came since the last look: many at once take hardly longer than one."""
        rows, self._unseen = self._unseen, []
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self._watch is not None:
            for row in rows:
                self._report(self._watch.step(row))

    def _machine(self, figures: Figures) -> None:
        """Write a look at the machine; called in the sampler's thread."""
        self._file.write({"event": "machine", "time": time.time(), **figures})
        if self._watch is not None:
            self._report(self._watch.figures(figures))

    def _report(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self._file.write(alert.to_row())
            if self._on_alert is not None:
                self._on_alert(alert)


def gpu_uuid(device: torch.device) -> str | None:
    """The name that NVML knows a GPU by; None for a CPU."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def is_first_here() -> bool:
    """Whether this is the rank that looks at the whole node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
