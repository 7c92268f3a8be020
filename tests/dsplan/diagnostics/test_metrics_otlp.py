"""Metrics of a run over OTLP, as a collector receives them: a real HTTP server that decodes the official messages."""

from __future__ import annotations

import gzip
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.metrics_endpoint import FIGURES, Figure, RunCollector
from dsplan.diagnostics.metrics_otlp import OtlpExporter, otlp_target
from hardware_db.errors import DsplanError
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.run_lock import RunLock
from strategies.launch.run_status import STATES, TROUBLES
from strategies.run_directory.spec import LaunchSpec
from tests.dsplan.cli import Cli
from tests.dsplan.diagnostics.test_metrics_endpoint import SCRIPT
from tests.dsplan.diagnostics.test_metrics_endpoint import port as port
from tests.dsplan.run_directories import append, restarted_run, steps
from tests.strategies.launch.command import start_run

ROOT = Path(__file__).parents[3]
NEEDED = "needs opentelemetry-sdk and its OTLP exporter (extra otel)"


@dataclass
class Collector:
    """A server of the tests' own, and everything that was sent to it."""

    address: str = ""
    answer: int = 200
    delay_seconds: float = 0.0
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Samples by name and attributes, without the run's."""
    kinds: dict[str, str] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        (resource,) = request.resource_metrics
        self.resources.append({item.key: item.value.string_value for item in resource.resource.attributes})
        samples: dict[str, float] = {}
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            self.kinds[metric.name], self.units[metric.name] = kind, metric.unit
            for point in getattr(metric, kind).data_points:
                attributes = {item.key: item.value.string_value for item in point.attributes}
                assert attributes.pop("run")
                labels = ",".join(f'{name}="{value}"' for name, value in attributes.items())
                samples[f"{metric.name}{{{labels}}}" if labels else metric.name] = point.as_double
        self.rounds.append(samples)

    def wait(self, rounds: int = 1) -> None:
        deadline = time.monotonic() + 30
        while len(self.paths) < rounds:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            time.sleep(taken.delay_seconds)
            taken.headers.append({name.lower(): value for name, value in self.headers.items()})
            if taken.answer == 200:
                taken.take(body)
            taken.paths.append(self.path)
            self.send_response(taken.answer)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    taken.address = f"http://127.0.0.1:{server.server_port}"
    yield taken
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def exporter_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OtlpExporter]:
    """An exporter of a run that was restarted, which sends five times in a second."""
    restarted_run(tmp_path / "run", now=time.time())
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")

    def make(endpoint: str | None, *, wanted: bool = True) -> OtlpExporter:
        spec = LaunchSpec(
            script="train.py",
            arguments=("--api-key", "hush"),
            processes=2,
            run_directory=str(tmp_path / "run"),
            supervision=DEFAULT_SUPERVISION,
            run_id="ab" * 16,
        )
        return OtlpExporter(spec, otlp_target(endpoint, wanted=wanted))

    return make


def in_prometheus(figure: Figure) -> str:
    """The name that a Prometheus gives what it is sent (its "OTLP translation": suffixes of units, and of counters)."""
    words = {"s": "seconds", "By": "bytes", "1": "ratio" if figure.kind == "gauge" else ""}
    unit, _, per = re.sub(r"\{.*?\}", "", figure.unit).partition("/")
    suffix = "_".join(filter(None, (words.get(unit, unit), f"per_{words[per].removesuffix('s')}" if per else "")))
    name = figure.otel_name.replace(".", "_") + (f"_{suffix}" if suffix else "")
    return f"{name}_total" if figure.kind == "counter" else name


def collected(collector: RunCollector) -> dict[str, float]:
    """Return all that Prometheus is served, under OpenTelemetry's names and without the run's label."""
    names = {figure.exported_name: figure.otel_name for figure in FIGURES}
    samples = {}
    for sample in (sample for metric in collector.collect() for sample in metric.samples):
        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name != "run")
        samples[names[sample.name] + (f"{{{labels}}}" if labels else "")] = sample.value
    return samples


def test_a_prometheus_that_is_sent_them_has_the_same_names() -> None:
    others = {in_prometheus(figure): figure.exported_name for figure in FIGURES}
    assert {name: own for name, own in others.items() if name != own} == {
        "dsplan_step_duration_seconds": "dsplan_step_seconds"  # dsplan.step is the number of the step
    }


def test_names_and_units_are_opentelemetry_s() -> None:
    names = {figure.otel_name for figure in FIGURES}
    assert len(names) == len(FIGURES)
    assert all(re.fullmatch(r"dsplan(\.[a-z]+(_[a-z]+)*)+", name) for name in names)
    assert {re.sub(r"\{\w+\}", "{}", figure.unit) for figure in FIGURES} == {"", "1", "s", "By", "{}", "{}/s"}


def test_a_collector_gets_what_prometheus_does(
    collector: Collector, tmp_path: Path, exporter_of: Callable[..., OtlpExporter]
) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (extra metrics)")
    exporter, scraped = exporter_of(collector.address), RunCollector()
    scraped.follow(tmp_path / "run")
    with RunLock(tmp_path / "run"):
        exporter.start()
        exporter.start()
        collector.wait()
        expected = collected(scraped)
        append(tmp_path / "run" / "metrics-rank0.jsonl", steps(101, 103, loss=float("nan")))
        collector.wait(len(collector.paths) + 4)
    assert list(exporter.finish(in_a_hurry=False)) == []
    exporter.close()
    first = collector.rounds[0]
    assert first.keys() == expected.keys()
    for name, value in first.items():
        changes = name in ("dsplan.held", "dsplan.device", "dsplan.quiet", "dsplan.checkpoint.age", "dsplan.goodput")
        assert value == (pytest.approx(expected[name], abs=3) if changes else expected[name]), name
    assert first['dsplan.run.state{state="resumed"}'] == 1
    assert sum(name.startswith("dsplan.run.state") for name in first) == len(STATES)
    assert sum(name.startswith("dsplan.alerts") for name in first) == len(TROUBLES)
    assert collector.rounds[-1]["dsplan.step"] == 103
    assert "dsplan.loss" not in collector.rounds[-1]
    counters = {figure.otel_name for figure in FIGURES if figure.kind == "counter"}
    assert {name for name, kind in collector.kinds.items() if kind == "sum"} == counters & collector.kinds.keys()
    assert collector.units == {
        figure.otel_name: figure.unit for figure in FIGURES if figure.otel_name in collector.kinds
    }
    assert set(collector.paths) == {"/v1/metrics"}


def test_the_standard_variables_count(
    collector: Collector,
    exporter_of: Callable[..., OtlpExporter],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.address}/base/",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20hush,broken hush",
        "OTEL_RESOURCE_ATTRIBUTES": "team=speech,host.name=other",
        "OTEL_SERVICE_NAME": "pretraining",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otlp_target(None, wanted=False) is None  # nothing is sent because a variable is there
    exporter = exporter_of(None)
    exporter.start()
    exporter.close()
    assert collector.paths == ["/base/v1/metrics"]
    assert collector.headers[0]["authorization"] == "Basic hush"
    resource = collector.resources[0]
    expected = {"service.name": "pretraining", "team": "speech", "host.name": "other", "dsplan.run.name": "run"}
    assert {name: resource[name] for name in expected} == expected
    assert resource["service.instance.id"] == "ab" * 16
    assert "hush" not in str(collector.resources)
    assert "hush" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("answer", "delay_seconds", "reason"),
    [(401, 0.0, "401 Unauthorized"), (302, 0.0, "302 Found"), (200, 1.5, "it does not answer in time")],
)
def test_a_collector_that_takes_nothing_is_one_line(
    collector: Collector,
    exporter_of: Callable[..., OtlpExporter],
    monkeypatch: pytest.MonkeyPatch,
    answer: int,
    delay_seconds: float,
    reason: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hush")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    collector.answer, collector.delay_seconds = answer, delay_seconds
    exporter = exporter_of(collector.address.replace("//", "//ada:hush@") + "/?key=hush")
    exporter.start()
    lines: list[str] = []
    deadline = time.monotonic() + 30
    while not lines:
        assert time.monotonic() < deadline
        lines += exporter.remarks()
        time.sleep(0.01)
    time.sleep(0.5)
    began = time.monotonic()
    lines += [*exporter.remarks(), *exporter.finish(in_a_hurry=True)]
    assert time.monotonic() - began < 10
    (line,) = lines
    assert line == f"{collector.address} takes no metrics ({line.partition('(')[2].partition(')')[0]}); " + (
        "training continues, and it is tried again"
    )
    assert reason in line
    assert "hush" not in line


def test_a_collector_that_is_away_keeps_nobody(
    exporter_of: Callable[..., OtlpExporter],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    monkeypatch.setattr("dsplan.diagnostics.metrics_otlp._LAST_SECONDS", 0.5)
    exporter = exporter_of(f"http://127.0.0.1:{port}")
    exporter.start()
    began = time.monotonic()
    lines = list(exporter.finish(in_a_hurry=False))
    assert time.monotonic() - began < 5  # of the ten seconds in which the SDK tries again
    assert lines == [
        f"http://127.0.0.1:{port} takes no metrics (no connection); training continues, and it is tried again"
    ]
    assert "".join(capfd.readouterr()) == ""


def test_what_cannot_be_sent_to_starts_no_run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    monkeypatch.chdir(tmp_path)
    line = "run --run-dir here"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
        assert "pip install 'dsplan[otel]'" in cli.refuses(f"{line} --otlp train.py")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    refused = cli.refuses(f"{line} --otlp-endpoint collector:4318 train.py")
    assert "--otlp-endpoint: " in refused
    assert "is no address of a collector; name one such as http://localhost:4318" in refused
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://ada:hush@host:port/?key=hush")
    refused = cli.refuses(f"{line} --otlp train.py")
    assert refused.startswith("dsplan: OTEL_EXPORTER_OTLP_ENDPOINT: https://host:port is no address")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert "OTEL_EXPORTER_OTLP_PROTOCOL: grpc is not what dsplan sends" in cli.refuses(f"{line} --otlp train.py")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://localhost:4318/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp/"}, "https://c/otlp/v1/metrics"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "https://d/own"},
            "https://d/own",
        ),
    ],
)
def test_addresses_are_those_of_the_specification(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    target = otlp_target(None, wanted=True)
    assert target is not None
    assert target.url == url
    given = otlp_target("http://e:1", wanted=False)
    assert given is not None
    assert given.url == "http://e:1/v1/metrics"
    with pytest.raises(DsplanError):
        otlp_target("ftp://e", wanted=True)


def test_the_docs_name_what_is_sent() -> None:
    page = (ROOT / "docs" / "how-to" / "watching.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(dsplan\.[\w.]+)` \| (?:`(.*?)`)? *\| `(dsplan_\w+)` \|$", page, re.MULTILINE)
    assert rows == [(figure.otel_name, figure.unit, figure.exported_name) for figure in FIGURES]


@pytest.mark.slow  # two ranks train for 6 seconds
def test_a_real_run_sends_what_it_would_serve(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (extra metrics)")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--nproc", "2", "--run-dir", "here", "--otlp-endpoint", collector.address)
    run = start_run(*flags, "train.py", cwd=tmp_path)
    try:
        out, err = run.communicate(timeout=250)
    finally:
        run.kill()
    assert run.returncode == 0, err
    assert "takes no metrics" not in out + err
    assert len({samples["dsplan.step"] for samples in collector.rounds if samples["dsplan.step"] > 0}) >= 3
    assert collector.rounds[-2]['dsplan.run.state{state="running"}'] == 1
    served = RunCollector()
    served.follow(tmp_path / "here")
    last = collector.rounds[-1]
    assert last == pytest.approx(collected(served))
    assert (last['dsplan.run.state{state="ended"}'], last["dsplan.step"]) == (1, 60)
