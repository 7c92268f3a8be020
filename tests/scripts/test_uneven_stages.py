"""A pipeline of which some ranks are at half speed: the cut that the planner chooses, run on real ranks."""

from __future__ import annotations

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from scripts.measure.uneven_stages import CASES, RANKS, Case, measure


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_planned_cut_takes_as_long_as_the_ideal_one(case: Case) -> None:
    """The shortest step counts: what else runs on the machine only adds to it."""
    with RankPool(RANKS, timeout_seconds=300.0) as pool:
        figures = measure(case, pool, rounds=1, block_seconds=0.03)
    assert figures.computed["plan"] <= 1.001 * figures.computed["ideal"]
    assert figures.ratio("even") >= 1.4
    assert figures.measured["plan"] <= 1.1 * figures.computed["ideal"], "beside the schedule without messages"
    assert figures.ratio("even", "plan") == pytest.approx(figures.predicted, rel=0.1)
    assert max(figures.loss_difference, figures.parameter_difference) < 1e-5
