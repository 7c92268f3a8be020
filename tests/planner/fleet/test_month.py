"""Simulated months: they are what the formula says where it holds, and every second of them goes somewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest

pytest.importorskip("simpy", reason="needs simpy (extra simulate)")

from planner.cost.failures import goodput
from planner.fleet.month import Fleet, Month, simulate

DAY = 86_400.0
PER_NODE = 3.79 / 1000 / DAY
FLEET = Fleet(
    nodes=2048, failures_per_node_second=PER_NODE, interval_seconds=224.0, save_seconds=2.3, restart_seconds=660.0
)
ALL_AT_ONCE = Fleet(
    nodes=100,
    failures_per_node_second=30 * PER_NODE,
    interval_seconds=1800.0,
    save_seconds=30.0,
    restart_seconds=600.0,
    spares=2,
    repair_seconds=1.5 * DAY,
    stragglers_per_node_second=10 * PER_NODE,
    slowdown=1.2,
    straggler_seconds=0.3 * DAY,
    preemptions_per_second=0.5 / DAY,
    preempted_seconds=7200.0,
    speed=lambda nodes: nodes / 100 if nodes >= 97 else 0.0,
)


def months(fleet: Fleet, days: float, count: int) -> list[Month]:
    return [simulate(fleet, days * DAY, seed) for seed in range(count)]


def test_the_mean_of_months_is_the_exact_formula() -> None:
    """Llama 3's cluster, and one that fails every half hour."""
    for fleet in (FLEET, replace(FLEET, nodes=12_500, interval_seconds=90.0)):
        mttf = 1 / (fleet.nodes * PER_NODE)
        exact = goodput(fleet.interval_seconds, save=fleet.save_seconds, restart=660.0, mttf=mttf)
        assert fmean(month.goodput for month in months(fleet, 20, 8)) == pytest.approx(exact, rel=0.01)


def test_failures_are_as_many_as_llama_3_had() -> None:
    """419 in 54 days of 2,048 nodes, from their rate; over 90 % of the time trained."""
    each = months(FLEET, 54, 10)
    assert fmean(month.failures for month in each) == pytest.approx(419, rel=0.1)
    assert min(month.goodput for month in each) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_every_second_goes_somewhere_whatever_happens(seed: int) -> None:
    month = simulate(ALL_AT_ONCE, 30 * DAY, seed)
    assert month.duration == pytest.approx(30 * DAY)
    assert all(spent > 0 for spent in month.seconds.values()), month.seconds
    safe = [work for _, work in month.progress]
    assert safe == sorted(safe)
    assert safe[-1] <= month.seconds["training"] <= safe[-1] + ALL_AT_ONCE.interval_seconds
    assert month.most_lost <= 1.2 / 0.97 * ALL_AT_ONCE.interval_seconds


def test_a_month_is_the_same_for_the_same_seed_only() -> None:
    assert simulate(ALL_AT_ONCE, 10 * DAY, 1) == simulate(ALL_AT_ONCE, 10 * DAY, 1)
    assert simulate(ALL_AT_ONCE, 10 * DAY, 1) != simulate(ALL_AT_ONCE, 10 * DAY, 2)


def test_nothing_happens_to_a_job_that_nothing_can_stop() -> None:
    calm = replace(FLEET, failures_per_node_second=0.0, interval_seconds=1000.0, save_seconds=10.0)
    month = simulate(calm, 10 * 1010.0, 0)
    assert month.seconds["training"] == pytest.approx(10_000)
    assert month.seconds["saving"] == pytest.approx(100)
    assert simulate(replace(calm, interval_seconds=math.inf), DAY, 0).goodput == 1.0


def test_a_slow_node_costs_what_it_slows_until_it_is_replaced() -> None:
    """Stragglers of an hour each, at half the speed: half an hour is lost to each."""
    fleet = replace(
        FLEET, failures_per_node_second=0.0, stragglers_per_node_second=1 / (2048 * DAY), slowdown=2.0,
        straggler_seconds=3600.0,
    )  # fmt: skip
    month = simulate(fleet, 20 * DAY, 3)
    assert month.stragglers > 5
    assert 0.85 < month.seconds["slow"] / (month.stragglers * 1800) <= 1, "two at once are as slow as one"
    assert month.seconds["lost"] == 0, "a slow node is replaced after a save"


def test_spares_run_out_and_an_elastic_job_trains_meanwhile() -> None:
    waiting = replace(ALL_AT_ONCE, speed=None, preemptions_per_second=0.0, stragglers_per_node_second=0.0)
    rigid = fmean(month.seconds["waiting"] for month in months(waiting, 30, 4))
    more = fmean(month.seconds["waiting"] for month in months(replace(waiting, spares=50), 30, 4))
    elastic = fmean(month.seconds["waiting"] for month in months(replace(waiting, speed=ALL_AT_ONCE.speed), 30, 4))
    assert more < elastic < rigid
    assert more < 0.01 * rigid


def test_a_month_of_too_many_failures_goes_on_as_it_did() -> None:
    """The rest counts like the second half of what was simulated, so that the formula holds as before."""
    fleet = replace(FLEET, failures_per_node_second=10 * PER_NODE)
    exact = goodput(224.0, save=2.3, restart=660.0, mttf=1 / (2048 * 10 * PER_NODE))
    each = [simulate(fleet, 300 * DAY, seed, most_events=2000) for seed in range(4)]
    assert fmean(month.simulated_seconds for month in each) == pytest.approx(2000 / 2048 / 10 / PER_NODE, rel=0.1)
    assert fmean(month.goodput for month in each) == pytest.approx(exact, rel=0.03)
    assert fmean(month.failures for month in each) == pytest.approx(300 * DAY * 2048 * 10 * PER_NODE, rel=0.1)
    assert all(month.duration == pytest.approx(300 * DAY) for month in each)
    assert simulate(FLEET, DAY, 0, most_events=2000) == simulate(FLEET, DAY, 0)


def test_nothing_useful_is_left_of_a_job_that_fails_before_it_is_back() -> None:
    hopeless = simulate(replace(FLEET, failures_per_node_second=1 / DAY), 30 * DAY, 0, most_events=1000)
    assert hopeless.goodput < 1e-6
    assert hopeless.failures == pytest.approx(30 * 2048, rel=0.1)
    assert hopeless.seconds["restarting"] == pytest.approx(30 * DAY, rel=1e-3)
    rare = replace(FLEET, failures_per_node_second=1000 / DAY, spares=1, repair_seconds=DAY / 2)
    waiting = simulate(rare, 30 * DAY, 0, most_events=1000)
    assert waiting.seconds["waiting"] > 0.99 * 30 * DAY, "a job that waits is not met by the failures meanwhile"
    assert waiting.simulated_seconds == 30 * DAY
