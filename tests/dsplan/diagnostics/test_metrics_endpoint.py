"""Prometheus metrics of a run, as somebody scrapes them, and the dashboard that queries them."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsplan.diagnostics.metrics_endpoint import FIGURES, serve_metrics
from strategies.launch.run_lock import RunLock
from strategies.launch.run_status import STATES, TROUBLES
from tests.dsplan.cli import Cli
from tests.dsplan.run_directories import append, restarted_run, steps
from tests.strategies.launch.command import start_run

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "scripts" / "examples" / "grafana.json"
SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
SCRIPT = """
import time
import torch
import dsplan

torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return ((self.line(x) - y) ** 2).mean()

data = [(torch.randn(8), torch.zeros(1)) for _ in range(8 * 60)]
engine, _, loader, _ = dsplan.initialize(
    model=Model(), training_data=data, config={"train_batch_size": 8}, strategy="ddp"
)
for x, y in loader:
    engine.backward(engine(x, y))
    engine.step()
    time.sleep(0.1)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    """Samples by name and labels, without the run's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = {}
    for name, labels, value in SAMPLE.findall(text):
        others = ",".join(label for label in labels.split(",") if not label.startswith("run="))
        samples[f"{name}{{{others}}}" if others else name] = float(value)
    return samples


def test_a_scrape_gives_the_run_as_it_is(tmp_path: Path, port: int) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (extra metrics)")
    restarted_run(tmp_path, now=time.time())
    with RunLock(tmp_path), serve_metrics(port) as metrics:
        assert scrape(port) == {}  # no run yet
        metrics.follow(tmp_path)
        first = scrape(port)
        append(tmp_path / "metrics-rank0.jsonl", steps(101, 103, loss=float("nan")))
        second = scrape(port)
    expected = {
        "dsplan_step": 100, "dsplan_loss": 2.0, "dsplan_step_seconds": 1.0, "dsplan_tokens_per_second": 128,
        "dsplan_peak_memory_bytes": 3 << 20, "dsplan_ranks": 2,
        "dsplan_restarts_total": 1, "dsplan_checkpoint_step": 40,
        'dsplan_alerts_total{kind="killed"}': 1, 'dsplan_alerts_total{kind="not_finite"}': 0,
        'dsplan_run_state{state="resumed"}': 1, 'dsplan_run_state{state="running"}': 0,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert first["dsplan_goodput_ratio"] == pytest.approx(0.5, abs=0.01)
    assert first["dsplan_checkpoint_age_seconds"] == pytest.approx(130, abs=2)
    assert first["dsplan_device_seconds_total"] == pytest.approx(2 * first["dsplan_held_seconds_total"])
    assert sum(name.startswith("dsplan_run_state") for name in first) == len(STATES)
    assert sum(name.startswith("dsplan_alerts_total") for name in first) == len(TROUBLES)
    assert second["dsplan_step"] == 103
    assert "dsplan_loss" not in second
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_names_follow_the_conventions_of_prometheus() -> None:
    for figure in FIGURES:
        assert re.fullmatch(r"dsplan_[a-z_]+", figure.name)
        assert not figure.name.endswith("_total")
        assert not re.search(r"_(ms|milliseconds|minutes|hours|percent|mib|gib|kb)\b", figure.name)
    assert len({figure.exported_name for figure in FIGURES}) == len(FIGURES)


def queries(node: object) -> Iterator[str]:
    """Every PromQL expression of a dashboard, also those that fill its variables."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str))
        for value in node.values():
            yield from queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from queries(value)


def test_the_dashboard_queries_what_is_exported() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    used = {name for query in queries(dashboard) for name in re.findall(r"dsplan_\w+", query)}
    exported = {figure.exported_name: figure for figure in FIGURES}
    assert used <= exported.keys()
    assert exported.keys() - used == set()
    labels = {"run", "instance", "job", *(label for figure in FIGURES for label in figure.labels)}
    grouped = {by for query in queries(dashboard) for by in re.findall(r"(?:by|on) \((.*?)\)", query)}
    grouped = {label for by in grouped for label in by.split(", ")}
    assert grouped <= labels
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_docs_name_what_is_exported() -> None:
    page = (ROOT / "docs" / "how-to" / "watching.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(dsplan_\w+)(?:\{.*\})?` \| (.*) \|$", page, re.MULTILINE))
    assert rows == {figure.exported_name: figure.help for figure in FIGURES}


def test_metrics_that_cannot_be_served_start_no_run(
    cli: Cli, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    monkeypatch.chdir(tmp_path)
    line = f"run --run-dir here --metrics-port {port}"
    assert "add it, or leave both out" in cli.refuses("run --run-dir here --metrics-host 0.0.0.0 train.py")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "prometheus_client", None)
        assert "pip install 'dsplan[metrics]'" in cli.refuses(f"{line} train.py")
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (extra metrics)")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert "give another --metrics-port or --metrics-host" in cli.refuses(f"{line} train.py")
    assert "no metrics can be served at nowhere.invalid" in cli.refuses(
        f"{line} --metrics-host nowhere.invalid train.py"
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.slow  # two ranks train for 6 seconds
def test_a_real_run_is_scraped_while_it_trains(tmp_path: Path, port: int) -> None:
    pytest.importorskip("prometheus_client", reason="needs prometheus-client (extra metrics)")
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ("--nproc", "2", "--run-dir", "here", "--metrics-port", str(port))
    process = start_run(*flags, "train.py", cwd=tmp_path)
    seen: list[dict[str, float]] = []
    try:
        while process.poll() is None:
            time.sleep(0.5)
            try:
                seen.append(scrape(port))
            except OSError:
                continue
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, err
    stepped = [samples for samples in seen if samples.get("dsplan_step", 0) > 0]
    assert len({samples["dsplan_step"] for samples in stepped}) >= 3
    assert all(samples['dsplan_run_state{state="running"}'] for samples in stepped[:-1])
    assert 0 < stepped[-1]["dsplan_goodput_ratio"] <= 1
    assert stepped[-1]["dsplan_step_seconds"] == pytest.approx(0.1, abs=0.1)
