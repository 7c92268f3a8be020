"""TRL's trainers as they were measured on CPU ranks, against what is predicted of them."""

from __future__ import annotations

import pytest

from scripts.measure.trl_memory import TrlRun, predicted_bytes, read_runs


@pytest.mark.parametrize("run", read_runs(), ids=lambda run: f"{run.trainer}-{run.strategy}")
def test_plans_of_trl_take_what_was_measured(run: TrlRun) -> None:
    """A plan made inside the run says what a question from outside says, of the same model."""
    assert 0.95 <= predicted_bytes(run) / run.peak_bytes <= 1.1
    assert run.planned_bytes == pytest.approx(predicted_bytes(run), rel=0.01)
