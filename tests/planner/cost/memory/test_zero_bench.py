"""The benchmark of our own ZeRO: what its rows say, and that every run of its part for one GPU can be planned."""

from __future__ import annotations

import statistics
from argparse import Namespace
from types import ModuleType

import pytest

from hardware_db.measured_rows import SHIPPED


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.report import zero_report as build_zero_report

    return build_zero_report


def test_states_are_those_of_the_arithmetic(report: ModuleType) -> None:
    """Rajbhandari et al. 2020, figure 1, on two and four ranks, within 2 %."""
    rows = [row for row in report.read(SHIPPED / "zero_cpu.csv").values() if row.backend == "native"]
    single = [row for row in rows if row.peak_bytes and row.accumulation == 1]
    assert {row.ranks for row in single} == {2, 4}
    for row in single:
        between, full = report.arithmetic(row.strategy, row.precision, row.ranks, report.PARAMETERS[row.model])
        assert row.resident_bytes == pytest.approx(between, rel=0.02), row.line
        assert row.states_bytes == pytest.approx(full, rel=0.02), row.line


def test_peaks_are_not_above_others(report: ModuleType) -> None:
    rows = report.read(SHIPPED / "zero_cpu.csv")
    for row in rows.values():
        if row.backend == "native" and row.peak_bytes:
            assert row.peak_bytes <= rows[row.setting, (row.strategy, "deepspeed")].peak_bytes, row.line
            if row.strategy == "zero3":
                assert row.peak_bytes <= 1.03 * rows[row.setting, ("fsdp", "torch")].peak_bytes, row.line


def test_steps_are_not_slower_than_others(report: ModuleType) -> None:
    rows = report.read(SHIPPED / "zero_cpu.csv")
    settings = {row.setting for row in rows.values() if row.steps}
    assert len(settings) == 8
    for stage, _, other in report.PAIRS:
        ratios = [
            rows[setting, (stage, "native")].step_seconds / rows[setting, other].step_seconds for setting in settings
        ]
        assert statistics.median(ratios) <= 1.0
        assert max(ratios) <= 1.1


def test_every_run_of_one_gpu_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench import zero_cuda

    size = Namespace(model="llama-1.2b", micro_batch=4, length=2048)
    for run in zero_cuda.RUNS:
        assert zero_cuda.turns_of(run, "h200", size).subject.plan["verdict"] == "fits", run
