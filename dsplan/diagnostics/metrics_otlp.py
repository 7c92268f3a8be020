"""Metrics of a run sent over OTLP by the process of `dsplan run` beside the ranks, where somebody asked for that.

They are those of `FIGURES`, which Prometheus gets, under names of OpenTelemetry's form. Where they go, how often, and
with which headers is in the standard `OTEL_` variables; the SDK reads them, and no header is ever shown.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dsplan.diagnostics.metrics_endpoint import FIGURES, Figure
from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from strategies.launch.run_status import RunFollower, RunStatus
from strategies.run_directory.spec import LaunchSpec

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OF_METRICS = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_USUAL = "http://localhost:4318"
"""Where a collector of this machine listens (OpenTelemetry Protocol Exporter, "Endpoint URLs for OTLP/HTTP")."""
_SIGNAL = "/v1/metrics"
_LAST_SECONDS = 6.0
"""How long a run that is over waits for the collector to take its last figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtlpTarget:
    """A collector."""

    url: str
    """Of the metrics."""

    @property
    def shown(self) -> str:
        """The address without user, password, path and query, any of which may be a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def otlp_target(endpoint: str | None, *, wanted: bool) -> OtlpTarget | None:
    """Return where metrics go: to `endpoint`, or if it is only `wanted` that they go, where the variables say.

    None where nobody asked.

    Raises:
        DsplanError: OpenTelemetry is not installed, or the address or the protocol is none that it can send to.
    """
    if endpoint is None and not wanted:
        return None
    try:
        import opentelemetry.exporter.otlp.proto.http.metric_exporter
        import opentelemetry.sdk.metrics  # noqa: F401
    except ImportError:
        raise DsplanError(
            "opentelemetry-sdk with its OTLP exporter is not installed here, and --otlp needs it;"
            " pip install 'dsplan[otel]'"
        ) from None
    for name in _PROTOCOLS:
        if (protocol := os.environ.get(name, "").strip() or _PROTOCOL) != _PROTOCOL:
            raise DsplanError(
                f"{name}: {protocol} is not what dsplan sends; unset it and name the collector's port for"
                f" {_PROTOCOL}, usually 4318"
            )
        if name in os.environ:
            break
    named = "--otlp-endpoint" if endpoint else _OF_METRICS if os.environ.get(_OF_METRICS) else ENDPOINT
    base = endpoint or os.environ.get(ENDPOINT) or _USUAL
    url = os.environ[_OF_METRICS] if named == _OF_METRICS else base.rstrip("/") + _SIGNAL
    target = OtlpTarget(url=url)
    if not _is_address(url):
        raise DsplanError(f"{named}: {target.shown} is no address of a collector; name one such as {_USUAL}")
    return target


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


class OtlpExporter:
    """A thread of OpenTelemetry's SDK beside the ranks, which sends what the run's files say; none without a target.

    The run neither waits for the collector nor fails with it: one request is under way at a time and nothing is queued,
    so that a collector which is slow gets fewer figures. What is wrong is one line, once.
    """

    def __init__(self, spec: LaunchSpec, target: OtlpTarget | None) -> None:
        self._spec, self._target = spec, target
        self._run = RunFollower(spec.directory)
        self._status: RunStatus | None = None
        self._provider: MeterProvider | None = None
        self._problem = ""
        self._has_complained = False

    def start(self) -> None:
        """Start it, once."""
        if self._target is None or self._provider is not None:
            return
        _silence_the_library()
        import requests
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        session = requests.Session()
        session.request = self._noting(session.request)
        exporter = OTLPMetricExporter(endpoint=self._target.url, session=session)
        # The process of a run ends when the run says so, and not when the SDK's own hook does.
        self._provider = MeterProvider(
            metric_readers=[PeriodicExportingMetricReader(exporter)],
            resource=_resource(self._spec),
            shutdown_on_exit=False,
        )
        meter = self._provider.get_meter("dsplan")
        for figure in FIGURES:
            create = meter.create_observable_counter if figure.kind == "counter" else meter.create_observable_gauge
            create(figure.otel_name, callbacks=[self._reader_of(figure)], unit=figure.unit, description=figure.help)

    def remarks(self) -> list[str]:
        """Return a line once there is something wrong, and no more after it."""
        if not self._problem or self._has_complained or self._target is None:
            return []
        self._has_complained = True
        return [f"{self._target.shown} takes no metrics ({self._problem}); training continues, and it is tried again"]

    def finish(self, *, in_a_hurry: bool) -> Iterator[str]:
        """Send the figures of the run's end, but for seconds only."""
        self.close()
        yield from self.remarks()

    def close(self) -> None:
        """Send the last figures, and end."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown(timeout_millis=_LAST_SECONDS * 1000)

    def _reader_of(self, figure: Figure) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def read(_: CallbackOptions) -> Iterable[Observation]:
            if figure is FIGURES[0]:  # instruments are read in the order in which they were created: one look for all
                self._status = self._run.look()
            if (status := self._status) is None:
                return
            for labels, value in figure.samples(status):
                yield Observation(value, {"run": status.name, **dict(zip(figure.labels, labels, strict=True))})

        return read

    def _noting(self, request: Callable[..., Any]) -> Callable[..., Any]:
        """Return a session's `request` that notes in words without an address why the collector took nothing."""
        import requests

        def noting(*arguments: Any, **named: Any) -> Any:
            try:
                answer = request(*arguments, **named)
            except requests.Timeout:
                self._problem = "it does not answer in time"
                raise
            except requests.RequestException as error:
                self._problem = "no connection" if isinstance(error, requests.ConnectionError) else type(error).__name__
                raise
            if answer.status_code >= 300:  # a redirection is not followed
                self._problem = f"it answers {answer.status_code} {answer.reason}"
            return answer

        return noting


def _resource(spec: LaunchSpec) -> Resource:
    """Return who sends: names of OpenTelemetry's semantic conventions, over which those of the variables go."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    from dsplan import __version__

    own = {
        "service.name": "dsplan",
        "service.version": __version__,
        "service.instance.id": spec.run_id or spec.directory.name,
        "host.name": socket.gethostname(),
        "dsplan.run.name": spec.directory.resolve().name,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _silence_the_library() -> None:
    """Keep the SDK's own lines, in which headers and addresses may stand, from the terminal of a run."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
