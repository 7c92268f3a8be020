"""`dsplan.TrainingMonitor`: metrics of a script of its own, what the machine does beside them, and alerts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hardware_db.notices import label_lines, notice
from strategies.config.sections import read_settings
from strategies.config.values import MonitorSettings, Threshold
from strategies.distributed.launcher_env import read_own_variables
from strategies.errors import CannotRun
from strategies.protocols import Observer, TrainingEngine
from strategies.telemetry.alerts import Alert, AlertKind
from strategies.telemetry.detectors import Detector, Thresholds, Watch, metric_detectors
from strategies.telemetry.follow import AlertFollower
from strategies.telemetry.machine import Sampler
from strategies.telemetry.metrics import MetricsFile
from strategies.telemetry.monitor import Recorder, is_first_here
from strategies.telemetry.step_rows import StepRows
from strategies.telemetry.tensorboard_log import TensorboardWriter
from strategies.variables import RUN_DIRECTORY


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
        self.forward_starts = self._rows.forward_starts  # type: ignore[method-assign]
        self.loss_is = self._rows.loss_is  # type: ignore[method-assign]

    def starts(self, section: str) -> None:
        """Note the learning rate of a step that begins."""
        if section == "step":
            self._rate = self._engine.get_lr()[0]  # a scheduler changes it at the end of the step

    def step_ended(self) -> None:
        """Hand over the step's row."""
        row = self._rows.step_ended()
        norm = self._engine.gradient_norm
        row |= {"learning_rate": self._rate, **({} if norm is None else {"gradient_norm": float(norm)})}
        if row["seconds"] > 0:
            row["samples_per_second"] = row["samples"] / row["seconds"]
        self._take(row)

    def close(self) -> None:
        """Stop to measure, and call `end`."""
        self._rows.close()
        self._end()


Metrics = Mapping[str, float]
_DETECTED_BY_RUN: tuple[AlertKind, ...] = ("not_finite", "loss_spike", "slowdown", "memory_creep", "throttled")
"""What `dsplan run` finds and shows by itself."""


class TrainingMonitor(Recorder):
    """Follows a training script's metrics, an engine, and the machine; one per rank, closed at the end or by Python.

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

    _watch: Watch
    _sampler: Sampler

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
        arguments: dict[str, Any] = {"gpu": track_gpu_memory, "cpu": track_cpu_memory, "network": track_network}
        if sample_seconds is not None:
            arguments["sample_seconds"] = sample_seconds
        if isinstance(alerts, MonitorSettings):
            self.settings = alerts
        else:
            self.settings = read_settings({**(alerts or {}), **arguments}, where="TrainingMonitor")
        self.rank = read_own_variables().rank
        self._every, self._quiet = log_interval, quiet
        directory = Path(log_dir)
        file = MetricsFile(directory, self.rank) if save_logs else None
        self._tensorboard = TensorboardWriter.in_directory(directory) if tensorboard and self.rank == 0 else None
        self._thresholds = Thresholds(self.settings.thresholds)
        self._detectors: dict[str, list[Detector]] = {}
        self._metric_callbacks: dict[str, Callable[[Metrics], object]] = {}
        self._alert_callbacks: dict[str, Callable[[Alert], object]] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        self._latest: dict[str, float] = {}
        self._from_sampler: deque[Alert] = deque()
        self._others = AlertFollower(directory) if save_logs and is_first_here() else None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        super().__init__(directory, rank=self.rank, device=device, file=file, settings=self.settings)

    def track_metric(self, name: str, value: float | torch.Tensor, step: int) -> None:
        """Note a value of a step; a tensor is kept as it is until it is written."""
        number = value.detach() if isinstance(value, torch.Tensor) else float(value)
        if step not in self._pending and len(self._pending) >= self._every:
            self.flush()
        self._pending.setdefault(step, {})[name] = number

    def watch(self, engine: TrainingEngine, *, owned: bool = False) -> None:
        """Follow an engine too: loss, seconds, rate, learning rate and memory of its steps, with all detectors.

        An engine that owns its monitor closes it.
        """
        engine.observers.append(EngineFeed(engine, self._take_step, self.close if owned else self.flush))

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
        """Return the machine's figures of now, by the names of `strategies/telemetry/machine.py`.

        `gpu_memory` (of the whole GPU, None without one) and `cpu_memory` (of this process) are bytes.
        """
        figures = self._sampler.now()
        memory = figures.get("rss_bytes") if self.settings.cpu else None
        return {**figures, "gpu_memory": figures.get("gpu_memory_used_bytes"), "cpu_memory": memory}

    def flush(self) -> None:
        """Read the pending values, write them, and notify whoever wants to know."""
        pending, self._pending = self._pending, {}
        alerts: list[Alert] = []
        rows = [
            {"step": step, **{name: float(value) for name, value in values.items()}} for step, values in pending.items()
        ]
        for row in rows:
            alerts += self._judge(row)
            self._write({"event": "metrics", **row})
        if self._tensorboard is not None and rows:
            self._tensorboard.write(rows)
        self._report(alerts)
        if rows:
            self._latest |= rows[-1]
            self._end_interval(int(rows[-1]["step"]))

    def _finish(self) -> None:
        self.flush()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _take_alerts(self, alerts: list[Alert]) -> None:
        self._from_sampler.extend(alerts)  # callbacks wait for the training thread

    def _take_step(self, row: Mapping[str, Any]) -> None:
        """Take a step of the engine that is watched."""
        self._write(row)
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        self._latest |= numbers
        if self._tensorboard is not None:
            self._tensorboard.write([{**numbers, "step": numbers["global_step"]}])
        self._report(self._watch.step(row))
        if int(row["global_step"]) % self._every == 0:
            self._end_interval(int(row["global_step"]))

    def _judge(self, row: Metrics) -> list[Alert]:
        """Return the alerts that begin with a step's own metrics."""
        alerts: list[Alert | None] = []
        for name in (name for name in row if name != "step"):
            if name not in self._detectors:
                self._detectors[name] = metric_detectors(self.settings, name)
            alerts += [detector.judge(row) for detector in self._detectors[name]]
        alerts += self._thresholds.judge(row)
        return [replace(alert, rank=self.rank, step=int(row["step"])) for alert in alerts if alert is not None]

    def _end_interval(self, step: int) -> None:
        figures = {name: value for name, value in self._latest.items() if name != "step"}
        if self.rank == 0 and not self._quiet:
            print(_line(step, figures), flush=True)
        for callback in list(self._metric_callbacks.values()):
            callback({**self._machine, **self._latest})
        waiting = [self._from_sampler.popleft() for _ in range(len(self._from_sampler))]
        if self._others is not None and not os.environ.get(RUN_DIRECTORY):
            waiting += [alert for alert in self._others.read() if alert.kind == "straggler"]
        self._report(waiting)

    def _notify(self, alert: Alert) -> None:
        # `dsplan run` shows what it finds itself.
        if not (os.environ.get(RUN_DIRECTORY) and alert.kind in _DETECTED_BY_RUN):
            notice(alert.line())
        for callback in list(self._alert_callbacks.values()):
            callback(alert)


_SHOWN = ("loss", "seconds", "samples_per_second", "learning_rate", "gradient_norm")
"""Of an engine's figures; of a script's own metrics all are shown."""
_OF_ENGINE = frozenset({"event", "global_step", "samples", "tokens", "load_seconds", "ready_seconds", "measured_by"})


def _line(step: int, figures: Metrics) -> str:
    shown = {
        name: value
        for name, value in figures.items()
        if name in _SHOWN or not (name in _OF_ENGINE or name.endswith("_bytes"))
    }
    return ", ".join([label_lines(f"step {step}"), *(f"{name} {value:.4g}" for name, value in shown.items())])
