"""Shipped step times of real CPU ranks against what the planner says of them with the rates of the same machine."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.measured_rows import SHIPPED, read_time_runs, write_time_runs

RUNS = read_time_runs(SHIPPED / "times_cpu.csv")
STRATEGIES = {"ddp", "fsdp", "zero1", "zero2", "zero3"}
MEDIAN = 0.15
NAMED_RIGHTLY = 0.8


@pytest.fixture
def real_times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.measure import real_times

    return real_times


def test_the_rows_cover_what_is_promised() -> None:
    assert all(run.outcome == "completed" for run in RUNS)
    assert {run.strategy for run in RUNS} == STRATEGIES
    assert {run.world_size for run in RUNS} == {2, 4}
    assert len({run.model_config["model_type"] for run in RUNS}) == 3
    assert len({run.key for run in RUNS}) == len(RUNS)
    batches = {(run.model, run.world_size, run.global_batch_size, run.sequence_length) for run in RUNS}
    assert len(batches) >= 10


def test_parts_of_a_step_add_up_and_steps_are_alike() -> None:
    for run in RUNS:
        parts = run.forward_seconds + run.backward_seconds + run.optimizer_seconds
        assert parts == pytest.approx(run.step_seconds, rel=0.25), run
        assert run.fastest_seconds <= run.step_seconds <= run.slowest_seconds


@pytest.mark.parametrize("calibrated", [False, True])
def test_step_times_are_as_predicted_after_a_benchmark(calibrated: bool, real_times: ModuleType) -> None:
    bench = real_times.shipped_bench(calibrated=calibrated)
    timed = [bench.timed(run) for run in RUNS]
    assert real_times.median_error(timed) <= MEDIAN


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_fastest_strategy_is_named(calibrated: bool, real_times: ModuleType) -> None:
    contests = real_times.contests(RUNS, real_times.shipped_bench(calibrated=calibrated))
    assert all(len(contest.entries) == len(STRATEGIES) for contest in contests)
    assert sum(contest.named_rightly for contest in contests) >= NAMED_RIGHTLY * len(contests)
    assert statistics.median(contest.order for contest in contests) >= 0.7


def test_ten_runs_of_a_model_halve_the_error_on_the_next_ten(real_times: ModuleType) -> None:
    """Against what is said before anything was measured on the machine; the median over the three models counts."""
    rates = real_times.read_rates(real_times.CPU_FILES.rates)
    lessons = [real_times.learning(own, rates) for own in real_times.by_batch(RUNS).values()]
    assert len(lessons) == 3
    assert statistics.median(lesson.after / lesson.before for lesson in lessons) <= 0.5
    assert all(lesson.after <= lesson.before for lesson in lessons)


def test_runs_survive_a_file(tmp_path: Path) -> None:
    runs = [RUNS[0], replace(RUNS[1], outcome="failed")]
    write_time_runs(tmp_path / "runs.csv", runs)
    assert read_time_runs(tmp_path / "runs.csv") == runs
    broken = tmp_path / "broken.csv"
    broken.write_text((tmp_path / "runs.csv").read_text().replace(",cpu,1,", ",cpu,many,"))
    with pytest.raises(BrokenFile, match="row 1: is not a timed run"):
        read_time_runs(broken)
