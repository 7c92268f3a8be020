"""Lessons of the runs of published users, from predictions that had not seen their publication."""

from __future__ import annotations

import statistics

import pytest

from scripts.fit.calibration_users import users
from scripts.fit.time_accuracy import read_left_out


@pytest.mark.slow
def test_ten_runs_of_a_published_user_improve_the_next_ten() -> None:
    left_out = users(read_left_out())
    assert len(left_out) >= 10
    shares = [user.after / user.before for user in left_out]
    # What is left is how single runs scatter: vTrain's grid keeps 4 % whatever is fitted to it.
    assert statistics.median(user.after for user in left_out) <= 0.05
    assert statistics.median(shares) <= 0.8
    assert sum(share < 1 for share in shares) >= 0.8 * len(shares)
    off = [user for user in left_out if user.before > 0.08]
    assert statistics.median(user.after / user.before for user in off) <= 0.65
