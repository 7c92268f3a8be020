"""The grids of timed runs: what they cover, and that every plan of them can be made without the machine."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.measure import time_grid

    return time_grid


@pytest.fixture
def memory_rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from scripts.measure import memory_rows

    return memory_rows


def test_groups_of_cpu_runs_differ_in_their_strategy_alone(grid: ModuleType) -> None:
    groups = list(grid.cpu_grid())
    assert len(groups) >= 10
    assert {case.world_size for group in groups for case in group} == {2, 4}
    for group in groups:
        assert [case.strategy for case in group] == list(grid.STRATEGIES)
        assert len({(case.model, case.micro_batch, case.length, case.accumulation) for case in group}) == 1


def test_the_gpu_grid_has_forty_single_gpu_plans_and_some_that_offload(
    grid: ModuleType, memory_rows: ModuleType
) -> None:
    cases = [case for group in grid.gpu_grid() for case in group]
    questions = [memory_rows.question(case, "A100-SXM4-80GB")[1] for case in cases]
    assert len(set(zip([case.model for case in cases], questions, strict=True))) == len(cases) >= 40
    assert all(configuration.world_size == 1 for configuration in questions)
    assert {configuration.offload for configuration in questions} == {"none", "optimizer", "all"}
