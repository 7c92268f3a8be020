"""What tuning decides from measured steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.plan_io import plan_from_dict, plan_to_dict
from planner.request import Request, WorkOptions, make_request
from planner.resolve_cluster import HardwareRequest, resolve_cluster
from planner.search import recommend
from strategies import tuning
from strategies.launch.tuning_file import Tried, Tuning

START_SECONDS = 20.0


@cache
def _request() -> Request:
    cluster = resolve_cluster(HardwareRequest(gpus=4, gpu="A100-SXM4-80GB"))
    options = WorkOptions(seq_len=512, global_batch=32, precision="bf16")
    return make_request(resolve_model("openai-community/gpt2"), cluster, options)


@cache
def _plans() -> tuple[Plan, ...]:
    """Fastest first."""
    return recommend(replace(_request(), simplest_first=False)).plans


def _decided(plan: Plan, seconds: float, before: Tuning | None = None, **changes: Any) -> tuning.Decision:
    start = changes.get("start_seconds", START_SECONDS)
    return tuning.decide(plan, seconds, before or Tuning(), _request(), start)


def _following(decision: tuning.Decision) -> Plan:
    assert decision.tuning.following is not None
    return plan_from_dict(decision.tuning.following)


def test_the_fastest_plan_stays_however_long_its_steps_took() -> None:
    fastest = _plans()[0]
    for factor in (0.5, 1.0, 3.0):
        decision = _decided(fastest, factor * fastest.time.step_seconds)
        assert (decision.switches, decision.tuning.is_over, decision.why) == (False, True, "")
        assert _following(decision).configuration == fastest.configuration


def _slow_plan() -> Plan:
    """A plan that is predicted to take half as long again as the best."""
    from planner.candidate import Candidate
    from planner.candidates import shapes

    request, best = _request(), _plans()[0].time.step_seconds
    for shape in shapes(request):
        timed = Candidate(request, shape).timed(0)
        if shape.strategy == "ddp" and shape.tp == shape.pp == 1 and timed.time.step_seconds > 1.5 * best:
            return timed.plan
    raise AssertionError("none is so slow")


def test_a_slow_plan_gives_way_to_one_that_is_predicted_faster_with_what_was_measured() -> None:
    slow = _slow_plan()
    measured = 1.2 * slow.time.step_seconds
    decision = _decided(slow, measured)
    assert decision.switches
    assert not decision.tuning.is_over
    assert decision.tuning.switches == 1
    assert decision.tuning.tried == (Tried(plan=plan_to_dict(slow), step_seconds=measured),)
    offered = _following(decision)
    assert offered.time.step_seconds < 0.9 * measured
    assert offered.configuration.global_batch_size == 32
    assert "is predicted to take" in decision.why


def test_a_change_that_does_not_pay_for_the_restart_is_not_made() -> None:
    slow = _slow_plan()
    decision = _decided(slow, slow.time.step_seconds, start_seconds=tuning.PAYS_BACK_SECONDS)
    assert (decision.switches, decision.tuning.is_over) == (False, True)


def test_a_plan_that_measured_slower_goes_back_and_nothing_is_tried_after() -> None:
    first, second = _plans()[:2]
    took = first.time.step_seconds
    before = Tuning(tried=(Tried(plan=plan_to_dict(first), step_seconds=took),), switches=1)
    decision = _decided(second, 1.5 * took, before)
    assert (decision.switches, decision.tuning.is_over, decision.tuning.switches) == (True, True, 2)
    assert _following(decision).configuration == first.configuration
    assert " took " in decision.why
    close = _decided(second, 1.02 * took, before)
    assert not close.switches


def test_after_a_few_changes_what_runs_stays() -> None:
    slow = _slow_plan()
    decision = _decided(slow, slow.time.step_seconds, Tuning(switches=tuning.MOST_SWITCHES))
    assert (decision.switches, decision.tuning.is_over) == (False, True)


def test_a_plan_measured_again_counts_with_its_newest_time() -> None:
    fastest = _plans()[0]
    before = Tuning(tried=(Tried(plan=plan_to_dict(fastest), step_seconds=9.0),))
    (tried,) = _decided(fastest, 1.0, before).tuning.tried
    assert tried.step_seconds == pytest.approx(1.0)
