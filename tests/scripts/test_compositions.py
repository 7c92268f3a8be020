"""The memory of split models is predicted to the byte that real ranks needed."""

from __future__ import annotations

from statistics import median

import pytest

from scripts.measure.compositions import read_compositions, scored

RUNS = [run for run in read_compositions() if run.outcome == "completed"]
ERRORS = {run: scored(run).error for run in RUNS}


def test_live_bytes_of_the_busiest_rank_are_predicted() -> None:
    sizes = sorted(abs(error) for error in ERRORS.values())
    assert median(sizes) <= 0.01
    assert sizes[-1] <= 0.06


@pytest.mark.parametrize("degree", ["tp", "pp", "cp"])
def test_every_way_to_split_a_model_is_measured(degree: str) -> None:
    of_degree = {run: error for run, error in ERRORS.items() if getattr(run, degree) > 1}
    assert of_degree, degree
    assert median(abs(error) for error in of_degree.values()) <= 0.02


def test_a_busiest_rank_is_one_of_all() -> None:
    for run in RUNS:
        assert len(run.stages) == run.world_size
        assert max(run.stages) == run.peak_allocated_bytes
