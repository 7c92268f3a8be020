"""The figures of a run come from the rows of its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strategies.run_directory.files import metrics_path
from strategies.telemetry.follow import LineFollower
from strategies.telemetry.metrics import last_attempt, lineage, of_attempt, read_metrics, summarise


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


def _attempt(index: int, steps: range, **more: Any) -> list[dict[str, Any]]:
    """The rows of one attempt that trained the global steps `steps`."""
    rows = [_step(row, 1.0 + index, global_step=step, loss=100.0 * index + step) for row, step in enumerate(steps)]
    return [{"event": "attempt", "attempt": index}, *({**row, **more} for row in rows)]


def test_the_lineage_has_each_step_once_as_it_was_run_last() -> None:
    rows = [*_attempt(0, range(1, 9)), *_attempt(1, range(6, 8)), *_attempt(2, range(0)), *_attempt(3, range(6, 11))]
    assert [row["loss"] for row in lineage(rows)] == [1, 2, 3, 4, 5, 306, 307, 308, 309, 310]
    run = summarise([rows])
    assert (run.steps, run.first_loss, run.last_loss) == (10, 1, 310)


def test_what_followed_a_step_that_was_run_again_is_no_part_of_the_run() -> None:
    rows = [*_attempt(0, range(1, 9)), *_attempt(1, range(3, 5))]
    assert [row["global_step"] for row in lineage(rows)] == [1, 2, 3, 4]


def test_seconds_and_bytes_are_those_of_the_last_attempt_that_got_past_its_warm_up() -> None:
    four = [_attempt(0, range(1, 9), peak_bytes=900), _attempt(0, range(1, 9), peak_bytes=800)]
    rows = [[*four[0], *_attempt(1, range(6, 12), peak_bytes=70), *_attempt(2, range(11, 13), peak_bytes=5)], four[1]]
    run = summarise(rows)
    assert (run.steps, run.step_seconds, run.peak_allocated_bytes) == (12, 2.0, 70)
    assert run.samples_per_second == 4 / 2.0, "the rank that is gone trains no samples"
    first = summarise(of_attempt(rows, 0))
    assert (first.ranks, first.steps, first.step_seconds, first.peak_allocated_bytes) == (2, 8, 1.0, 900)
    assert first.samples_per_second == 8 / 1.0
    assert (last_attempt(rows), last_attempt([[]])) == (2, 0)
    assert of_attempt(rows, 7) == []


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
