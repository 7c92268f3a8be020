"""`dsplan.TrainingMonitor`: metrics of a script of its own, what the machine does beside them, and alerts."""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardware_db.notices import labelled, notice
from strategies.config.sections import read_settings
from strategies.config.values import MonitorSettings, Threshold
from strategies.distributed.launcher_env import own_place
from strategies.errors import CannotRun
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.alerts import Alert, AlertKind
from strategies.telemetry.detectors import Detector, NotFinite, Spikes, Thresholds, Watch
from strategies.telemetry.follow import AlertFollower
from strategies.telemetry.machine import Figures, MachineReader, Sampler
from strategies.telemetry.metrics import MetricsFile
from strategies.telemetry.monitor import gpu_uuid, is_first_here
from strategies.telemetry.step_rows import StepRows
from strategies.telemetry.tensorboard_log import TensorboardWriter
from strategies.variables import RUN_DIRECTORY

# Figures of an engine's steps.


class EngineFeed(Observer):
    """Hands the row of every step to `take`, with the learning rate and the norm of the gradients."""

    def __init__(
        self, engine: TrainingEngine, take: Callable[[Mapping[str, Any]], object], end: Callable[[], object]
    ) -> None:
        self._engine, self._take, self._end = engine, take, end
        self._rate = engine.get_lr()[0]
        self._rows = StepRows(
            engine.device,
            sequence_length=engine.configuration.sequence_length,
            sharing=engine.configuration.sharing,
            global_steps=lambda: engine.global_steps,
            tracks=False,  # it slows a step down, and the run's own metrics have it
        )

    def forward_starts(self, module: torch.nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        self._rows.forward_starts(module, inputs)

    def loss_is(self, loss: torch.Tensor) -> None:
        self._rows.loss_is(loss)

    def starts(self, section: str) -> None:
        if section == "step":
            self._rate = self._engine.get_lr()[0]  # a scheduler changes it at the end of the step

    def step_ended(self) -> None:
        row = self._rows.step_ended()
        norm = self._engine.gradient_norm
        row |= {"learning_rate": self._rate, **({} if norm is None else {"gradient_norm": float(norm)})}
        if row["seconds"] > 0:
            row["samples_per_second"] = row["samples"] / row["seconds"]
        self._take(row)

    def close(self) -> None:
        self._rows.close()
        self._end()


Metrics = Mapping[str, float]
_DETECTED_BY_RUN: tuple[AlertKind, ...] = ("not_finite", "loss_spike", "slowdown", "memory_creep", "throttled")
"""What `dsplan run` finds and shows by itself."""


class TrainingMonitor:
    """Follows a training script's metrics, an engine, and the machine. One per rank; `close` at the end, or leave
    Python.

    Values may be tensors on a GPU: they are read every `log_interval` steps, all at once, so that the GPU is waited for
    as seldom. Then they go to `log_dir/metrics-rank{N}.jsonl` (`save_logs`), to TensorBoard's files in `log_dir` and
    one line of the terminal on rank 0, and to the callbacks. Every `sample_seconds` a thread looks at the GPU, the
    processors and memory, and the network and disks, as far as the `track_` arguments say.

    Args:
        alerts: settings of the detectors and `thresholds`, as the config's section `monitor` has them; as a value they
            stand for `sample_seconds` and the `track_` arguments too.

    Raises:
        CannotRun: a setting is not known or not of its kind.
        BackendMissing: TensorBoard is asked for and not installed.
    """

    def __init__(
        self,
        *,
        log_interval: int = 10,
        save_logs: bool = True,
        log_dir: str | Path = "logs",
        tensorboard: bool = False,
        quiet: bool = False,
        track_gpu_memory: bool = True,
        track_cpu_memory: bool = True,
        track_network: bool = True,
        sample_seconds: float | None = None,
        alerts: Mapping[str, Any] | MonitorSettings | None = None,
    ) -> None:
        if log_interval < 1:
            raise CannotRun(f"TrainingMonitor: log_interval is {log_interval}; it must be at least 1")
        asked: dict[str, Any] = {"gpu": track_gpu_memory, "cpu": track_cpu_memory, "network": track_network}
        if sample_seconds is not None:
            asked["sample_seconds"] = sample_seconds
        if isinstance(alerts, MonitorSettings):
            self.settings = alerts
        else:
            self.settings = read_settings({**(alerts or {}), **asked}, place="TrainingMonitor")
        self.rank = own_place().rank
        self._every, self._quiet = log_interval, quiet
        directory = Path(log_dir)
        self._file = MetricsFile(directory, self.rank) if save_logs else None
        self._tensorboard = TensorboardWriter.in_directory(directory) if tensorboard and self.rank == 0 else None
        self._watch = Watch(self.settings, rank=self.rank)
        self._thresholds = Thresholds(self.settings.thresholds)
        self._detectors: dict[str, list[Detector]] = {}
        self._metric_callbacks: dict[str, Callable[[Metrics], object]] = {}
        self._alert_callbacks: dict[str, Callable[[Alert], object]] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        self._latest: dict[str, float] = {}
        self._machine: Figures = {}
        self._from_sampler: deque[Alert] = deque()
        self._others = AlertFollower(directory) if save_logs and is_first_here() else None
        self._sampler = self._started(directory)
        atexit.register(self.close)

    def track_metric(self, name: str, value: float | torch.Tensor, step: int) -> None:
        """Note a value of a step; a tensor is kept as it is until it is written."""
        number = value.detach() if isinstance(value, torch.Tensor) else float(value)
        if step not in self._pending and len(self._pending) >= self._every:
            self._write()
        self._pending.setdefault(step, {})[name] = number

    def watch(self, engine: TrainingEngine, *, owned: bool = False) -> None:
        """Follow an engine too: loss, seconds, rate, learning rate and memory of its steps, with all detectors. An
        engine that owns its monitor closes it."""
        engine.observers.append(EngineFeed(engine, self._engine_step, self.close if owned else self.flush))

    def add_callback(self, name: str, callback: Callable[[Metrics], object]) -> None:
        """Call `callback` with the latest value of every metric and of the machine, every `log_interval` steps.

        What it raises ends the script's step, so that a callback may stop a training. A second callback of one name
        replaces the first.
        """
        self._metric_callbacks[name] = callback

    def on_alert(self, name: str, callback: Callable[[Alert], object]) -> None:
        """Call `callback` with every alert, in the training thread; as `add_callback` otherwise."""
        self._alert_callbacks[name] = callback

    def add_threshold(self, metric: str, *, above: float | None = None, below: float | None = None) -> None:
        """Alert when a metric or a figure of the machine crosses a limit."""
        for thresholds in (self._thresholds, self._watch.thresholds):
            thresholds.set(metric, Threshold(above=above, below=below))

    def get_system_stats(self) -> dict[str, float | None]:
        """The machine now, by the names of `strategies/telemetry/machine.py`; `gpu_memory` (of the whole GPU, None
        without one) and `cpu_memory` (of this process) in bytes."""
        figures = self._sampler.now()
        memory = figures.get("rss_bytes") if self.settings.cpu else None
        return {**figures, "gpu_memory": figures.get("gpu_memory_used_bytes"), "cpu_memory": memory}

    def flush(self) -> None:
        """Write what is held back."""
        self._write()

    def close(self) -> None:
        """Write what is held back and end the thread; later calls do nothing."""
        self._sampler.close()
        self._write()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._file is not None:
            self._file.close()
        atexit.unregister(self.close)

    def _started(self, directory: Path) -> Sampler:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        reader = MachineReader(
            self.settings, gpu_uuid=gpu_uuid(device), directory=directory, whole_node=is_first_here()
        )
        return Sampler(reader, self.settings.sample_seconds, self._machine_read)

    def _machine_read(self, figures: Figures) -> None:
        """Called in the sampler's thread: callbacks wait for the training thread."""
        self._machine = figures
        if self._file is not None:
            self._file.write({"event": "machine", "time": time.time(), **figures})
        self._from_sampler.extend(self._watch.figures(figures))

    def _engine_step(self, row: Mapping[str, Any]) -> None:
        """A step of the engine that is watched."""
        if self._file is not None:
            self._file.write(row)
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        self._latest |= numbers
        if self._tensorboard is not None:
            self._tensorboard.write([{**numbers, "step": numbers["global_step"]}])
        self._report(self._watch.step(row))
        if int(row["global_step"]) % self._every == 0:
            self._at_interval(int(row["global_step"]))

    def _write(self) -> None:
        """Read the pending values, write them, and notify whoever wants to know."""
        pending, self._pending = self._pending, {}
        alerts: list[Alert] = []
        rows = [
            {"step": step, **{name: float(value) for name, value in values.items()}} for step, values in pending.items()
        ]
        for row in rows:
            alerts += self._judged(row)
            if self._file is not None:
                self._file.write({"event": "metrics", **row})
        if self._tensorboard is not None and rows:
            self._tensorboard.write(rows)
        self._report(alerts)
        if rows:
            self._latest |= rows[-1]
            self._at_interval(int(rows[-1]["step"]))

    def _judged(self, row: Mapping[str, float]) -> list[Alert]:
        """The alerts that begin with a step's own metrics."""
        found: list[Alert | None] = []
        for name in row:
            if name != "step":
                found += [detector.seen(row) for detector in self._detectors_of(name)]
        reported = [alert for alert in found if alert is not None] + self._thresholds.seen(row)
        return [replace(alert, rank=self.rank, step=int(row["step"])) for alert in reported]

    def _detectors_of(self, name: str) -> list[Detector]:
        if name not in self._detectors:
            spikes = [Spikes(self.settings.loss_spike, name)] if "loss" in name and self.settings.loss_spike else []
            self._detectors[name] = [NotFinite(name), *spikes]
        return self._detectors[name]

    def _at_interval(self, step: int) -> None:
        figures = {name: value for name, value in self._latest.items() if name != "step"}
        if self.rank == 0 and not self._quiet:
            print(_line(step, figures), flush=True)
        for callback in list(self._metric_callbacks.values()):
            callback({**self._machine, **self._latest})
        waiting = [self._from_sampler.popleft() for _ in range(len(self._from_sampler))]
        if self._others is not None and not os.environ.get(RUN_DIRECTORY):
            waiting += [alert for alert in self._others.read() if alert.kind == "straggler"]
        self._report(waiting)

    def _report(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            if self._file is not None:
                self._file.write(alert.to_row())
            # `dsplan run` shows what it finds itself.
            if not (os.environ.get(RUN_DIRECTORY) and alert.kind in _DETECTED_BY_RUN):
                notice(alert.line())
            for callback in list(self._alert_callbacks.values()):
                callback(alert)


_SHOWN = ("loss", "seconds", "samples_per_second", "learning_rate", "gradient_norm")
"""Of an engine's figures; of a script's own metrics all are shown."""
_OF_ENGINE = frozenset({"event", "global_step", "samples", "tokens", "load_seconds", "ready_seconds", "measured_by"})


def _line(step: int, figures: Metrics) -> str:
    shown = {name: value for name, value in figures.items() if name in _SHOWN or not _is_detail(name)}
    return ", ".join([labelled(f"step {step}"), *(f"{name} {value:.4g}" for name, value in shown.items())])


def _is_detail(name: str) -> bool:
    return name in _OF_ENGINE or name.endswith("_bytes")
