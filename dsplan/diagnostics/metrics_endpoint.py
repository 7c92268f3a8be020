"""Prometheus metrics of a run at `/metrics`, served by the process of `dsplan run` beside the ranks.

A scrape reads what the run's files have got since the last one; nothing is counted where nobody asks. The names follow
Prometheus' conventions: base units, `_total` for what only grows, and `run`, the run directory's name, on every sample.
Figures are those of `dsplan watch --runs`, over all attempts and commands of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from planner.errors import ContradictoryRequest
from strategies.launch.run_status import STATES, TROUBLES, RunFollower, RunStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LOCAL = "127.0.0.1"
Samples = list[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A metric: its name without `_total`, which Prometheus adds to counters, and the samples that a run gives."""

    name: str
    otel_name: str
    """OpenTelemetry's: words of a namespace, without the unit. A Prometheus that is sent it makes `name` of both."""
    unit: str
    """In UCUM; what is counted stands in braces, and what has no unit has none."""
    kind: Literal["gauge", "counter"]
    help: str
    samples: Callable[[RunStatus], Samples]
    """Label values behind `run`, and the figure; empty where the run has none."""
    labels: tuple[str, ...] = ()

    @property
    def exported_name(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _gauge(name: str, otel_name: str, unit: str, text: str, read: Callable[[RunStatus], float | None]) -> Figure:
    return Figure(
        name=name, otel_name=otel_name, unit=unit, kind="gauge", help=text, samples=lambda run: _one(read(run))
    )


def _counter(name: str, otel_name: str, unit: str, text: str, read: Callable[[RunStatus], float | None]) -> Figure:
    return Figure(
        name=name, otel_name=otel_name, unit=unit, kind="counter", help=text, samples=lambda run: _one(read(run))
    )


def _one(value: float | None) -> Samples:
    return [] if value is None else [((), float(value))]


FIGURES: tuple[Figure, ...] = (
    Figure(
        name="dsplan_run_state",
        otel_name="dsplan.run.state",
        unit="{run}",
        kind="gauge",
        help="1 for the state that the run is in, 0 for the others",
        labels=("state",),
        samples=lambda run: [((state,), float(state == run.state)) for state in STATES],
    ),
    Figure(
        name="dsplan_run_info",
        otel_name="dsplan.run.info",
        unit="{run}",
        kind="gauge",
        help="1, labelled with the plan in use",
        labels=("model", "strategy", "backend", "precision"),
        samples=lambda run: [(_plan_labels(run), 1.0)] if run.plan else [],
    ),
    _gauge(
        "dsplan_step",
        "dsplan.step",
        "{step}",
        "last optimizer step; a restart goes back to its checkpoint",
        lambda run: run.step,
    ),
    _gauge(
        "dsplan_requested_steps",
        "dsplan.requested_steps",
        "{step}",
        "steps that the script was told to do",
        lambda run: run.steps,
    ),
    _gauge("dsplan_loss", "dsplan.loss", "", "mean loss of the last step over the ranks", lambda run: run.loss),
    _gauge(
        "dsplan_step_seconds", "dsplan.step.duration", "s", "median of the last 20 steps", lambda run: run.step_seconds
    ),
    _gauge(
        "dsplan_tokens_per_second",
        "dsplan.tokens",
        "{token}/s",
        "tokens of all ranks in a step over the median time of the last 20",
        lambda run: run.tokens_per_second,
    ),
    _gauge(
        "dsplan_peak_memory_bytes",
        "dsplan.peak_memory",
        "By",
        "highest peak of a rank in this attempt",
        lambda run: run.peak_bytes,
    ),
    _gauge("dsplan_ranks", "dsplan.ranks", "{rank}", "ranks of the last attempt", lambda run: run.ranks),
    _gauge(
        "dsplan_goodput_ratio",
        "dsplan.goodput",
        "1",
        "share of the time that went into steps that count",
        lambda run: run.goodput,
    ),
    _gauge(
        "dsplan_checkpoint_step",
        "dsplan.checkpoint.step",
        "{step}",
        "step of the last checkpoint",
        lambda run: run.checkpoint_step,
    ),
    _gauge(
        "dsplan_checkpoint_age_seconds",
        "dsplan.checkpoint.age",
        "s",
        "time since the last checkpoint",
        lambda run: run.checkpoint_age_seconds,
    ),
    _gauge(
        "dsplan_quiet_seconds",
        "dsplan.quiet",
        "s",
        "time since the last sign of progress",
        lambda run: run.quiet_seconds,
    ),
    _counter("dsplan_restarts", "dsplan.restarts", "{restart}", "attempts after the first", lambda run: run.restarts),
    Figure(
        name="dsplan_alerts",
        otel_name="dsplan.alerts",
        unit="{alert}",
        kind="counter",
        help="alerts, and endings that were none on purpose, by kind",
        labels=("kind",),
        samples=lambda run: [((kind,), float(run.alerts.get(kind, 0))) for kind in TROUBLES],
    ),
    _counter(
        "dsplan_held_seconds",
        "dsplan.held",
        "s",
        "time in which the ranks held their devices",
        lambda run: run.held_seconds,
    ),
    _counter("dsplan_device_seconds", "dsplan.device", "s", "that time times ranks", lambda run: run.device_seconds),
    _counter(
        "dsplan_cost_dollars",
        "dsplan.cost.dollars",
        "{USD}",
        "its price, where the plan's node type has one",
        lambda run: run.usd(),
    ),
)
"""Every metric there is."""


def _plan_labels(run: RunStatus) -> tuple[str, ...]:
    assert run.plan is not None
    return run.plan.model, run.plan.strategy, run.plan.backend, run.plan.precision


class RunCollector:
    """The metrics of one run as prometheus-client collects them, from any of its server's threads."""

    def __init__(self) -> None:
        self._run: RunFollower | None = None
        self._lock = threading.Lock()

    def follow(self, directory: Path) -> None:
        """Give the metrics of this run from now on; before it there are none."""
        self._run = RunFollower(directory)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the run as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            status = None if self._run is None else self._run.look()
        if status is None:
            return
        for figure in FIGURES:
            family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            metric = family(figure.name, figure.help, labels=("run", *figure.labels))
            for labels, value in figure.samples(status):
                metric.add_metric((status.name, *labels), value)
            if metric.samples:
                yield metric


@contextmanager
def serve_metrics(port: int | None, host: str | None = None) -> Iterator[RunCollector]:
    """Serve metrics at `http://host:port/metrics` inside, on this machine's own address where no host is given.

    With no port nothing is served.

    Raises:
        DsplanError: prometheus-client is not installed, the address cannot be had, or there is a host and no port.
    """
    collector = RunCollector()
    if port is None and host is not None:
        raise ContradictoryRequest("--metrics-host says where --metrics-port is served; add it, or leave both out")
    if port is None:
        yield collector
        return
    server, thread = _start_server(collector, port, host or LOCAL)
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _start_server(collector: RunCollector, port: int, host: str) -> tuple[Any, threading.Thread]:
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise DsplanError(
            "prometheus-client is not installed here, and --metrics-port needs it; pip install 'dsplan[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that no name server would be asked for
        reason = getattr(error, "strerror", None) or error
        raise DsplanError(
            f"no metrics can be served at {host}:{port} ({reason}); give another --metrics-port or --metrics-host"
        ) from None
    return server, thread
