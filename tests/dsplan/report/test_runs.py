"""Pictures of runs and of what was learnt from them."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs plotly (extra report)")

from dsplan.question import Question
from dsplan.render.show import Text
from dsplan.report.calibration import calibration_pictures
from dsplan.report.run_data import MOST_POINTS, read_run
from dsplan.report.runs import compare_runs, course, predicted_and_measured, run_blocks
from hardware_db.errors import BrokenFile
from hardware_db.store import MemoryStore
from planner.calibration.learn import checks, refresh
from planner.search.search import recommend
from tests.planner.calibration.runs import HERE, User

BEGAN = 1.7e9


def _step(step: int, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    row = {"event": "step", "step": step - 1, "global_step": step, "loss": 10.0 / step, "seconds": seconds}
    return {**row, "samples": 4, "tokens": 400, "peak_bytes": 2**30, "rss_bytes": 2**28, **more}


def run_directory(directory: Path, steps: int = 10) -> Path:
    """Two attempts of two ranks: the first is killed after step `steps`, the second goes on from step 6."""
    journal = [
        {"event": "attempt", "attempt": 0, "time": BEGAN, "ranks": 2},
        {"event": "saved", "attempt": 0, "time": BEGAN + 30 + 10.5, "step": 5, "path": "x"},
        {
            "event": "ending", "attempt": 0, "time": BEGAN + 100, "kind": "killed", "rank": 1, "host": "",
            "step": steps,
            "reason": "killed by signal 9", "first_step": 1, "last_step": steps,
        },
        {"event": "decision", "attempt": 0, "time": BEGAN + 100, "action": "restart", "why": "starts again"},
        {"event": "attempt", "attempt": 1, "time": BEGAN + 110, "ranks": 2},
        {
            "event": "alert", "attempt": 1, "time": BEGAN + 140, "kind": "slowdown", "metric": "seconds", "rank": 1,
            "step": 8, "message": "slow <script>alert(1)</script>\x1b[31m",
        },
        {"event": "end", "attempt": 1, "time": BEGAN + 160, "outcome": "completed", "first_step": 6, "last_step": 12},
    ]  # fmt: skip
    directory.mkdir()
    (directory / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in journal))
    for rank in range(2):
        peak = {"peak_bytes": 2**30 * (rank + 1)}
        rows = [
            {"event": "attempt", "attempt": 0},
            *(_step(step, **peak) for step in range(1, steps + 1)),
            {"event": "attempt", "attempt": 1},
            *(_step(step, **peak) for step in range(6, 13)),
        ]
        (directory / f"metrics-rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_steps_restarts_and_alerts_are_on_one_axis_of_time(tmp_path: Path) -> None:
    run = read_run(run_directory(tmp_path / "run"))
    first, second = run.attempts
    # The checkpoint of step 5 was complete at 40.5 s, five steps of 2 s after the first began.
    assert [point.at for point in first.points][:2] == pytest.approx([32.5, 34.5])
    assert second.points[-1].at == pytest.approx(160)
    assert (second.began, run.seconds) == (110, 160)
    assert [(item.at, item.kind) for item in run.happenings] == [
        (pytest.approx(40.5), "checkpoint"),
        (100, "ending"),
        (140, "slowdown"),
    ]
    assert {point.units_per_second for point in run.points} == {400}  # 2 x 400 in 2 s
    assert {point.peak_bytes for point in run.points} == {2**31}
    picture = course(run)
    assert picture is not None
    assert "1 restart, 1 checkpoint, 1 alert" in picture.caption
    assert "<script>" not in json.dumps(picture.figure)
    assert any("starts again" in str(row[-1]) for row in picture.table.rows)


@pytest.mark.parametrize("device", ["RTX-4090", "cpu"])
def test_the_memory_of_a_card_is_its_limit(device: str, tmp_path: Path) -> None:
    plan = recommend(Question(model="openai-community/gpt2", gpus=1, gpu="RTX-4090").request()).plans[0]
    plan = replace(plan, cluster={**plan.cluster, "device": device})
    run = read_run(run_directory(tmp_path / "run"))
    picture = course(replace(run, report=replace(run.report, plan=plan)))
    assert picture is not None
    assert ("the card has" in json.dumps(picture.figure)) == (device != "cpu")


def test_steps_that_a_restart_undid_are_not_compared(tmp_path: Path) -> None:
    picture = compare_runs([read_run(run_directory(tmp_path / "a")), read_run(run_directory(tmp_path / "b"))])
    assert picture is not None
    assert list(picture.figure["data"][0]["x"]) == [*range(1, 6), *range(6, 13)]


def test_a_long_run_is_few_points_and_keeps_its_peak(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run", steps=10 * MOST_POINTS)
    lines = (directory / "metrics-rank0.jsonl").read_text().splitlines()
    lines[5000] = json.dumps(_step(5000, peak_bytes=2**33))
    (directory / "metrics-rank0.jsonl").write_text("\n".join(lines) + "\n")
    points = read_run(directory).attempts[0].points
    assert len(points) == MOST_POINTS
    assert max(point.peak_bytes or 0 for point in points) == 2**33
    assert points[-1].step == 10 * MOST_POINTS


def test_a_directory_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="is no run directory"):
        read_run(tmp_path)
    directory = run_directory(tmp_path / "run")
    (directory / "metrics-rank0.jsonl").write_text('{"event": "step", "step": 0, "seconds": "soon"}\n')
    with pytest.raises(BrokenFile, match="rows that dsplan did not write"):
        read_run(directory)


def test_metrics_that_no_command_watched_claim_no_end(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    assert read_run(directory).outcome == "completed"
    (directory / "run.jsonl").unlink()
    run = read_run(directory)
    assert run.outcome == "end unknown"
    assert run_blocks(run)[0] == Text(text="end unknown: 12 steps so far", style="warning")


def test_a_run_without_a_plan_has_only_what_was_measured(tmp_path: Path) -> None:
    picture = predicted_and_measured([read_run(run_directory(tmp_path / "run"))])
    assert picture is not None
    assert {row[2] for row in picture.table.rows} == {"-"}
    assert ["time of a step", "run", "-", "2 s (2 s to 2 s)", "-"] in [list(row) for row in picture.table.rows]


def test_a_run_that_measured_nothing_is_named_and_has_no_empty_place(tmp_path: Path) -> None:
    begun = run_directory(tmp_path / "begun")
    for file in begun.glob("metrics-rank*.jsonl"):
        file.write_text("")
    long = "20261123-124510-finetune_a_model_with_adapters_and_more"
    runs = [read_run(begun), read_run(run_directory(tmp_path / long)), read_run(run_directory(tmp_path / "other"))]
    picture = predicted_and_measured(runs)
    assert picture is not None
    assert "Nothing was measured of begun." in picture.caption
    assert {row[1] for row in picture.table.rows} == {long, "other"}
    words = [note["text"] for note in picture.figure["layout"]["annotations"]]
    # On a phone there is room for the end of a long name, and the numbers are on a line of their own.
    assert f"…{long[-33:]}<br>2 s, predicted -" in words


def test_lines_from_top_to_bottom_are_explained_where_there_are_any(tmp_path: Path) -> None:
    directory = run_directory(tmp_path / "run")
    before = course(read_run(directory))
    (directory / "run.jsonl").unlink()
    after = course(read_run(directory))
    assert before is not None
    assert after is not None
    assert "alerts (dotted) and endings" in before.caption
    assert "alerts (dotted) and endings" not in after.caption


def test_what_is_shown_of_a_calibration_is_what_was_learnt() -> None:
    store = MemoryStore()
    store.add(*User().runs(8))
    refreshed = refresh(store, HERE, keep=False)
    (kind,) = refreshed.kinds
    shown = checks(kind)
    for word, error in (("shipped", kind.lesson.error_before), ("left_out", kind.lesson.error_after)):
        errors = [abs(getattr(check, word)[1] / check.row.seconds - 1) for check in shown]
        assert statistics.median(errors) == pytest.approx(error)
    predictions, factors = calibration_pictures(refreshed)
    assert [len(trace["x"]) for trace in predictions.figure["data"]] == [8, 8]
    assert kind.lesson.calibration is not None
    assert list(factors.figure["data"][0]["y"]) == [name.replace("_", " ") for name in kind.lesson.calibration.names]
