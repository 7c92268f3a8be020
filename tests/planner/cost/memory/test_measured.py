"""Shipped measurements of whole steps on real CPU ranks against what the planner says of the same runs today."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.errors import BrokenFile
from hardware_db.measured_rows import SHIPPED, MemoryRun, read_memory_runs, write_memory_runs
from planner.types.plan_io import plan_to_dict
from planner.vocabulary import Task
from scripts.measure.gloo import quiet

RUNS = read_memory_runs(SHIPPED / "memory_cpu.csv")
STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3")
MEDIAN, WORST = 0.02, 0.06
LIVE = (("gpt2", "fsdp", "bf16"), ("llama", "zero2", "fp32"))
"""DeepSpeed comes last: it leaves state behind in its process."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.measure import memory_rows

    return memory_rows


@pytest.fixture
def pool(new_pool: Callable[..., RankPool]) -> Iterator[RankPool]:
    variables = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with new_pool(2, timeout_seconds=240, variables=variables) as ranks:
        yield quiet(ranks)


def test_the_rows_cover_what_users_run() -> None:
    completed = [run for run in RUNS if run.outcome == "completed"]
    assert len(completed) >= 60
    assert {run.strategy for run in completed} == set(STRATEGIES)
    assert {run.world_size for run in completed} == {1, 2, 3, 4}
    assert len({run.model_config["model_type"] for run in completed}) >= 10
    assert {run.precision for run in completed} == {"fp32", "bf16", "bf16-pure"}
    assert len({run.key for run in RUNS}) == len(RUNS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peaks_are_as_predicted(strategy: str, rows: ModuleType) -> None:
    """Over all of a strategy's runs: the median within 2 %, none off by more than 6 %."""
    compared = [rows.compared(run) for run in RUNS if run.strategy == strategy and run.outcome == "completed"]
    errors = {
        f"{comparison.run.model} {comparison.run.precision} x{comparison.run.world_size}": comparison.error()
        for comparison in compared
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    assert statistics.median(map(abs, errors.values())) <= MEDIAN
    assert abs(errors[worst]) <= WORST, f"{worst}: {errors[worst]:+.1%}"


def test_what_lives_between_steps_and_what_a_step_makes_is_exact_under_zero(rows: ModuleType) -> None:
    """Neither has activations in it: partitions, master weights, moments, buckets, and the step's copies alone."""
    compared = [rows.compared(run) for run in RUNS if run.strategy.startswith("zero") and run.outcome == "completed"]
    assert max(abs(comparison.error("step")) for comparison in compared) <= 0.01


def test_runs_survive_a_file(tmp_path: Path) -> None:
    write_memory_runs(tmp_path / "runs.csv", RUNS[:3])
    assert read_memory_runs(tmp_path / "runs.csv") == RUNS[:3]
    assert read_memory_runs(tmp_path / "none.csv") == []
    broken = tmp_path / "broken.csv"
    broken.write_text((tmp_path / "runs.csv").read_text().replace(",cpu,1,", ",cpu,many,"))
    with pytest.raises(BrokenFile, match="row 1: is not a memory run"):
        read_memory_runs(broken)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_rows_can_be_measured_again(rows: ModuleType, pool: RankPool) -> None:
    """Two shipped rows, with half their length so that they are quick: phases as predicted again."""
    from scripts.measure.measured_run import Subject, measure_subject

    for model, strategy, precision in LIVE:
        run = _shorter(
            next(
                measured
                for measured in RUNS
                if (measured.model, measured.strategy, measured.precision) == (model, strategy, precision)
            )
        )
        subject = Subject(config=run.model_config, task=cast("Task", run.task), plan=plan_to_dict(rows.planned(run)))
        ranks = pool.run(measure_subject, subject)
        busiest = max(ranks, key=lambda rank: rank.peak_bytes)
        phases = {f"{phase}_bytes": size for phase, size in busiest.phases.items()}
        again = rows.compared(replace(run, peak_allocated_bytes=busiest.peak_bytes, **phases))
        assert abs(again.error()) <= MEDIAN
        assert abs(again.error("step")) <= MEDIAN


def _shorter(run: MemoryRun) -> MemoryRun:
    return replace(run, sequence_length=run.sequence_length // 2)
