"""Widths by code base are those that published runs ask for, and hold runs of publications left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.calibration.spread import NINE_OF_TEN, OF_CODE, OF_CODE_ELSEWHERE, SPREADS, interval
from planner.cost.memory.overhead import BEYOND_NEED, BEYOND_NEED_OF, beyond_need
from scripts.fit.code_intervals import (
    ELSEWHERE,
    SHARE,
    Score,
    coverage,
    factor,
    factors,
    memory_scores,
    time_scores,
    widening,
)
from scripts.fit.memory_bound import SHARE as MEMORY_SHARE
from tests.planner.cost.timing.cases import cluster, make_job, run_by

TIMES = time_scores()


def test_widths_are_those_of_published_runs() -> None:
    found = factors(TIMES, SHARE)
    taken_for_nemo = ("megatron", "automodel")
    here = {code: value for code, value in OF_CODE.items() if code not in taken_for_nemo}
    elsewhere = {code + ELSEWHERE: value for code, value in OF_CODE_ELSEWHERE.items() if code not in taken_for_nemo}
    assert found == pytest.approx(here | elsewhere, rel=0.1)
    assert OF_CODE["megatron"] == OF_CODE["automodel"] == OF_CODE["nemo"]
    memory = factors(memory_scores(), MEMORY_SHARE)
    assert memory.keys() == BEYOND_NEED_OF.keys()
    assert all(1 + BEYOND_NEED_OF[code] > value - 0.01 for code, value in memory.items())


def test_they_hold_publications_left_out() -> None:
    held = coverage(TIMES, SHARE, 1.0)
    own = [held[code] for code in factors(TIMES, SHARE)]
    assert sum(runs for runs, _ in own) > 500
    assert sum(runs * inside for runs, inside in own) / sum(runs for runs, _ in own) > 0.9
    assert all(held[code][1] >= 0.9 for code in ("nemo", f"nemo{ELSEWHERE}", "megatron-deepspeed"))


def test_no_publication_weighs_more_than_one_of_ten_runs() -> None:
    long = [Score(code="a", publication="long", value=0.1)] * 99
    short = [Score(code="a", publication="short", value=2.0)] * 10
    assert factor([*long, *short], 0.4) == 0.1
    assert factor([*long, *short], 0.9) == 2.0
    assert factors([*long, *short], 0.9) == {"a": 2.0}
    assert not factors(short * 30, 0.9)
    assert coverage([*long, *short], 0.9, 1.0) == {"a": (109, pytest.approx(99 / 109))}
    # A single run weighs a tenth of that; of ten runs alone less is known than what is usual.
    assert factor([*long, *short[:1]], 0.9) == 0.1
    assert coverage([*short, *long[:15]], 0.9, 3.0) == {"a": (25, 1.0)}


def test_a_factor_is_widened_until_a_publication_left_out_stays_inside() -> None:
    near = [Score(code="a", publication="near", value=place / 20) for place in range(1, 21)]
    far = [Score(code="a", publication="far", value=place / 10) for place in range(1, 21)]
    assert coverage([*near, *far], 0.9, 1.0)["a"] == (40, 0.9)
    # What is far is inside 0.9 of what is near up to 1.8: nine of ten of all are inside 1.6.
    assert widening([*near, *far], 0.9) == pytest.approx(1.6 / 0.9)
    assert widening([*near, *far[:9]], 0.9) == 1.0


def test_a_job_has_the_width_of_its_code() -> None:
    node = make_job("gpt2", cluster(4, device="H100-SXM5-80GB", intra="nvlink4-h100"))
    low, high = interval(run_by(node, "torchtitan"), 1.0, None)
    half = NINE_OF_TEN * SPREADS["node"].outside * OF_CODE["torchtitan"]
    assert (math.log(low), math.log(high)) == pytest.approx((-half, half))
    assert interval(node, 1.0, None)[1] == pytest.approx(math.exp(NINE_OF_TEN * SPREADS["node"].outside))
    assert interval(run_by(node, "torchtitan-2024"), 1.0, None) == (low, high)
    newer = replace(node, cluster=cluster(4, device="B200-SXM-180GB", intra="nvlink5-b200"))
    wide = interval(run_by(newer, "nemo"), 1.0, None)[1]
    assert math.log(wide) == pytest.approx(NINE_OF_TEN * SPREADS["unmeasured"].outside * OF_CODE_ELSEWHERE["nemo"])
    assert beyond_need(node) == BEYOND_NEED
    assert beyond_need(run_by(node, "megatron")) < BEYOND_NEED
