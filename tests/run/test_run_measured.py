"""The figures of a run come from the rows of its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strategies.launch.tail import LineFollower
from strategies.metrics import metrics_path, read_metrics, summarise


def _step(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    row = {"event": "step", "step": step, "loss": 5.0 - step, "seconds": seconds, "samples": 4, "tokens": 400}
    return {**row, "peak_bytes": None, "reserved_bytes": None, "rss_bytes": 1000, "measured_by": None, **more}


def test_warm_up_and_the_tracked_step_stay_out_of_the_median() -> None:
    tracked = _step(2, 50.0, measured_by="storage-tracker", peak_bytes=77)
    rows = [_step(0, 9.0), _step(1, 8.0), tracked, _step(3, 2.0), _step(4, 4.0), _step(5, 3.0)]
    other = [_step(index, 1.0, peak_bytes=90) for index in range(6)]
    run = summarise([rows, other])
    assert (run.steps, run.step_seconds, run.peak_allocated_bytes) == (6, 3.0, 90)
    assert (run.first_loss, run.last_loss) == (5.0, 0.0)
    assert run.tokens_per_second == 800 / 3.0
    assert run.samples_per_second == 8 / 3.0


def test_a_run_without_steps_measures_nothing() -> None:
    run = summarise([[{"event": "plan"}], []])
    assert (run.steps, run.step_seconds, run.first_loss, run.peak_allocated_bytes) == (0, None, None, None)


def test_too_few_steps_give_no_step_time() -> None:
    run = summarise([[_step(0, 9.0), _step(1, 8.0)]])
    assert (run.steps, run.step_seconds, run.tokens_per_second) == (2, None, None)


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    assert metrics_path(tmp_path, 3).name == "metrics-rank3.jsonl"
    metrics_path(tmp_path, 0).write_text(json.dumps(_step(0, 1.0)) + '\n{"event": "st')
    first, second = read_metrics(tmp_path, 2)
    assert ([row["step"] for row in first], second) == ([0], [])


def test_a_follower_gives_each_line_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LineFollower(path)
    assert follower.read_lines() == []
    path.write_bytes("one\ntwo h\u00e9".encode()[:-1])
    assert follower.read_lines() == ["one"]
    with path.open("ab") as stream:
        stream.write("\u00e9".encode()[-1:] + b"\r\nlast")
    assert follower.read_lines() == ["two h\u00e9"]
    assert follower.read_lines(final=True) == ["last"]
    assert follower.read_lines(final=True) == []
