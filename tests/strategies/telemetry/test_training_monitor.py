"""`dsplan.TrainingMonitor` as a script uses it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan import DsplanError, TrainingMonitor
from strategies.telemetry.alerts import Alert
from strategies.telemetry.metrics import read_metrics
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe


def _rows(directory: Path, event: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(directory, 1)[0] if row["event"] == event]


def test_metrics_reach_file_terminal_and_callbacks_every_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, float]] = []
    monitor = TrainingMonitor(log_interval=4, log_dir=tmp_path)
    monitor.add_callback("keep", lambda metrics: seen.append(dict(metrics)))
    for step in range(1, 11):
        monitor.track_metric("loss", torch.tensor(10.0 / step), step)
        monitor.track_metric("accuracy", step / 10, step)
    assert [row["step"] for row in _rows(tmp_path, "metrics")] == [1, 2, 3, 4, 5, 6, 7, 8]
    monitor.close()
    monitor.close()
    rows = _rows(tmp_path, "metrics")
    assert rows == [
        {"event": "metrics", "step": step, "loss": pytest.approx(10 / step), "accuracy": step / 10}
        for step in range(1, 11)
    ]
    assert [metrics["accuracy"] for metrics in seen] == [0.4, 0.8, 1.0]
    assert capsys.readouterr().out.splitlines() == [
        "dsplan: step 4, loss 2.5, accuracy 0.4",
        "dsplan: step 8, loss 1.25, accuracy 0.8",
        "dsplan: step 10, loss 1, accuracy 1",
    ]


def test_alerts_call_back_are_printed_and_are_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alerts: list[Alert] = []
    monitor = TrainingMonitor(
        log_interval=1, log_dir=tmp_path, quiet=True, alerts={"thresholds": {"lag": {"above": 3}}}
    )
    monitor.on_alert("keep", alerts.append)
    monitor.add_threshold("accuracy", below=0.5)
    for step, (loss, lag, accuracy) in enumerate([(1, 2, 0.9), (math.nan, 4, 0.4), (math.nan, 5, 0.3), (1, 2, 0.6)]):
        for name, value in (("loss", loss), ("lag", lag), ("accuracy", accuracy)):
            monitor.track_metric(name, value, step)
    monitor.close()
    assert [(alert.kind, alert.metric, alert.step) for alert in alerts] == [
        ("not_finite", "loss", 1),
        ("threshold", "lag", 1),
        ("threshold", "accuracy", 1),
    ]
    assert _rows(tmp_path, "alert") == [alert.to_row() for alert in alerts]
    assert capsys.readouterr().err.splitlines() == [f"dsplan: {alert.line()}" for alert in alerts]
    assert alerts[2].message == "accuracy is 0.4, below its threshold 0.5"


def test_a_callback_may_end_the_training(tmp_path: Path) -> None:
    def stop(alert: Alert) -> None:
        raise RuntimeError(alert.message)

    monitor = TrainingMonitor(log_interval=1, log_dir=tmp_path, quiet=True)
    monitor.on_alert("stop", stop)
    monitor.track_metric("loss", math.inf, 1)
    with pytest.raises(RuntimeError, match="loss is inf"):
        monitor.track_metric("loss", 1.0, 2)
    monitor.close()


def test_the_machine_is_looked_at_beside_the_training(tmp_path: Path) -> None:
    monitor = TrainingMonitor(log_dir=tmp_path, quiet=True, sample_seconds=0.05)
    stats = monitor.get_system_stats()
    assert stats["cpu_memory"] is not None
    assert stats["cpu_memory"] > 50 * 2**20
    assert (stats["gpu_memory"] is None) == (not torch.cuda.is_available())
    alerts: list[Alert] = []
    monitor.on_alert("keep", alerts.append)
    monitor.add_threshold("disk_free_bytes", above=1)
    deadline = time.monotonic() + 30
    while len(_rows(tmp_path, "machine")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    monitor.track_metric("loss", 1.0, 1)
    assert alerts == [], "callbacks run in the thread that trains"
    monitor.flush()
    monitor.close()
    assert [alert.metric for alert in alerts] == ["disk_free_bytes"]
    rows = _rows(tmp_path, "machine")
    figures = {"cpu_percent", "rss_bytes", "disk_free_bytes", "host_memory_available_bytes", "host_cpu_percent"}
    assert figures < set(rows[0])
    assert {"network_sent_bytes_per_second", "network_received_bytes_per_second"} < set(rows[1])
    assert all(value >= 0 for name, value in rows[1].items() if name != "event")


def test_only_what_is_tracked_is_read(tmp_path: Path) -> None:
    monitor = TrainingMonitor(save_logs=False, log_dir=tmp_path, track_cpu_memory=False, track_network=False)
    stats = monitor.get_system_stats()
    monitor.close()
    assert {name for name in stats if not name.startswith("gpu")} == {"disk_free_bytes", "cpu_memory"}
    assert stats["cpu_memory"] is None
    assert not list(tmp_path.glob("metrics*"))


def test_an_engine_is_followed_with_its_own_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    seen: list[dict[str, float]] = []
    engine = training_bodies.make_engine(Recipe(accumulation=2))
    monitor = TrainingMonitor(log_interval=3, log_dir=tmp_path, tensorboard=True, quiet=True)
    monitor.watch(engine)
    monitor.add_callback("keep", lambda metrics: seen.append(dict(metrics)))
    losses = [training_bodies.one_step(engine, step) for step in range(6)]
    engine.close()
    monitor.close()
    rows = _rows(tmp_path, "step")
    assert [row["loss"] for row in rows] == pytest.approx(losses)
    assert [(row["global_step"], row["samples"]) for row in rows] == [(step, 12) for step in range(1, 7)]
    assert all(row["learning_rate"] == 2e-3 and row["gradient_norm"] > 0 for row in rows)
    assert [metrics["global_step"] for metrics in seen] == [3, 6]
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_a_config_switches_it_on(tmp_path: Path) -> None:
    recipe = Recipe()
    torch.manual_seed(0)
    model = training_bodies.TinyModel()
    config = {"monitor": {"enabled": True, "output_path": str(tmp_path), "thresholds": {"loss": {"above": 0.01}}}}
    engine, *_ = training_bodies.initialize(model=model, plan=recipe.plan(), config=config)
    for step in range(3):
        training_bodies.one_step(engine, step)
    engine.close()
    rows = read_metrics(tmp_path, 1)[0]
    assert [row["event"] for row in rows] == ["step", "alert", "step", "step"]
    assert (rows[1]["kind"], rows[1]["metric"], rows[1]["step"]) == ("threshold", "loss", 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"log_interval": 0}, "log_interval is 0; it must be at least 1"),
        ({"alerts": {"slowdow": 2}}, "TrainingMonitor: slowdow is not known; it can be sample_seconds"),
        ({"alerts": {"slowdown": 0.5}}, "TrainingMonitor.slowdown is 0.5; it must be a number above 1"),
        ({"sample_seconds": 0}, "sample_seconds is 0; it must be a number above 0"),
        ({"alerts": {"thresholds": {"loss": 3}}}, "thresholds.loss is 3; it must be an object"),
        ({"alerts": {"thresholds": {"loss": {"over": 3}}}}, 'it must be written as {"above": number}'),
        ({"alerts": {"thresholds": {"loss": {"above": "3"}}}}, "thresholds.loss.above is '3'; it must be a number"),
    ],
)
def test_settings_that_are_not_understood(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DsplanError) as problem:
        TrainingMonitor(**{"log_dir": tmp_path, **settings})
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)
