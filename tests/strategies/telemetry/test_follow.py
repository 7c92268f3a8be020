"""News of the ranks reach whoever follows the run; ranks are compared with each other."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from strategies.run_directory.files import metrics_path
from strategies.run_directory.journal import append_line
from strategies.telemetry.alerts import Alert, post
from strategies.telemetry.follow import AlertFollower
from tests.strategies.telemetry.rows import step_row


def _write(directory: Path, rank: int, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        append_line(metrics_path(directory, rank), (json.dumps(row) + "\n").encode())


def _steps(steps: range, *, load: float, ready: float, seed: int = 0) -> list[dict[str, Any]]:
    """Steps of a second that begin with `load` and are at their loss after `ready` seconds, with a fifth of noise."""
    noise = random.Random(seed)

    def about(seconds: float) -> float:
        return seconds * noise.uniform(0.8, 1.2)

    return [step_row(step, load_seconds=about(load), ready_seconds=about(ready)) for step in steps]


def _attempt(index: int) -> dict[str, Any]:
    return {"event": "attempt", "attempt": index}


def test_alerts_of_all_ranks_are_read_once_and_those_of_one_cause_are_one(tmp_path: Path) -> None:
    old = Alert(kind="not_finite", metric="loss", message="loss is nan", time=1.0)
    _write(tmp_path, 0, [old.to_row()])
    follower = AlertFollower(tmp_path)
    assert follower.read(final=True) == [], "an earlier attempt's"
    same = [
        Alert(kind="not_finite", metric="loss", message="loss is nan", rank=rank, time=100.0 + rank) for rank in (0, 1)
    ]
    later = Alert(kind="not_finite", metric="loss", message="loss is nan", rank=1, time=400.0)
    other = Alert(kind="threshold", metric="disk_free_bytes", message="full", value=3.0, limit=4.0, step=7, time=101.0)
    _write(tmp_path, 0, [_attempt(1), same[0].to_row(), other.to_row()])
    assert follower.read(final=True) == [same[0], other]
    _write(tmp_path, 1, [same[1].to_row(), later.to_row()])
    assert follower.read(final=True) == [later]
    assert follower.read(final=True) == []


@pytest.mark.parametrize(("metric", "load", "ready"), [("load_seconds", 0.5, 0.8), ("ready_seconds", 0.01, 0.8)])
def test_a_rank_that_is_late_is_reported_once(tmp_path: Path, metric: str, load: float, ready: float) -> None:
    follower = AlertFollower(tmp_path)
    for rank in range(4):
        figures = (load, ready) if rank == 2 else (0.01, 0.3)
        _write(tmp_path, rank, [_attempt(0), *_steps(range(200), load=figures[0], ready=figures[1], seed=rank)])
    (alert,) = follower.read(final=True)
    assert (alert.kind, alert.metric, alert.rank) == ("straggler", metric, 2)
    assert "rank 2 takes" in alert.message
    assert alert.step < 100


def test_ranks_that_differ_by_noise_or_by_little_are_no_stragglers(tmp_path: Path) -> None:
    follower = AlertFollower(tmp_path)
    for rank in range(4):
        load = 0.05 if rank == 1 else 0.01  # five times the others', but a twentieth of a step
        _write(tmp_path, rank, [_attempt(0), *_steps(range(600), load=load, ready=0.3, seed=rank)])
    assert follower.read(final=True) == []


def test_ranks_that_are_gone_after_an_attempt_are_not_waited_for(tmp_path: Path) -> None:
    follower = AlertFollower(tmp_path)
    for rank in range(3):
        _write(tmp_path, rank, [_attempt(0), *_steps(range(30), load=0.01, ready=0.3)])
    assert follower.read(final=True) == []
    for rank in range(2):
        _write(tmp_path, rank, [_attempt(1), *_steps(range(100), load=0.01, ready=0.8 if rank else 0.3)])
    (alert,) = follower.read(final=True)
    assert alert.rank == 1


def test_one_rank_has_nobody_to_wait_for_it(tmp_path: Path) -> None:
    follower = AlertFollower(tmp_path)
    _write(tmp_path, 0, _steps(range(300), load=0.9, ready=0.95))
    assert follower.read(final=True) == []


def test_an_alert_that_a_rank_posts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = AlertFollower(tmp_path)
    monkeypatch.setenv("DSPLAN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "5")
    post(Alert(kind="checkpoint", metric="checkpoint", message="No space left on device", step=12))
    (alert,) = follower.read(final=True)
    assert (alert.kind, alert.rank, alert.step) == ("checkpoint", 5, 12)
    assert alert.line() == "alert: rank 5, step 12: No space left on device"


def test_an_alert_that_nobody_can_read_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    post(Alert(kind="checkpoint", metric="checkpoint", message="lost"))
    monkeypatch.setenv("DSPLAN_RUN_DIR", str(tmp_path / "nowhere"))
    post(Alert(kind="checkpoint", metric="checkpoint", message="lost again"))
    assert capsys.readouterr().err == "dsplan: alert: rank 0, step 0: lost\ndsplan: alert: rank 0, step 0: lost again\n"
