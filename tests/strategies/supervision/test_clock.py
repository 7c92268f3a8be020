"""The times at which ranks look at the clock, and at which they save."""

from __future__ import annotations

import itertools

import pytest

from planner.cost.failures import best_interval
from strategies.supervision.autosave_interval import Interval, SaveClock


def saves_of(interval: Interval, *, step_seconds: float, steps: int) -> tuple[list[int], int]:
    """The steps at which a training saves, and how often it looks."""
    clock, saves, looks = SaveClock(interval, step=0), [], 0
    for step in range(1, steps + 1):
        if step >= clock.next_look:
            looks += 1
            if clock.is_due(step, step * step_seconds):
                clock.saved()
                saves.append(step)
    return saves, looks


def test_by_steps_every_multiple_is_saved() -> None:
    saves, looks = saves_of(Interval(steps=7), step_seconds=0.1, steps=30)
    assert saves == [7, 14, 21, 28]
    assert looks == 5  # the first step sets the clock


@pytest.mark.parametrize("step_seconds", [0.05, 1.0, 40.0])
def test_by_time_saves_come_within_a_twentieth_of_the_interval_or_a_step(step_seconds: float) -> None:
    steps = int(3600 / step_seconds)
    saves, looks = saves_of(Interval(seconds=600.0), step_seconds=step_seconds, steps=steps)
    times = [0.0, *(step * step_seconds for step in saves)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(saves) >= 5
    assert all(600 * 0.95 - step_seconds <= gap <= 600 * 1.05 + 3 * step_seconds for gap in gaps)
    assert looks <= 0.03 * steps + 60


@pytest.mark.parametrize(("save", "hours"), [(3.0, 1.0), (20.0, 4.0), (90.0, 0.5)])
def test_saves_come_as_often_as_is_best_for_what_they_take_and_for_failures(save: float, hours: float) -> None:
    interval = Interval(seconds=600.0, mttf=3600 * hours)
    clock, now, begun, took, notices = SaveClock(interval, step=0), 0.0, [], None, []
    for step in range(1, 40_000):
        now += 1.0
        if step >= clock.next_look:
            is_due = clock.is_due(step, now, took)
            notices += filter(None, [clock.change(took)])
            if is_due:
                begun.append(now)
                now += save
                took = save * (1.05 if len(begun) % 2 else 1.0)
                clock.saved()
    gaps = [later - earlier - save for earlier, later in itertools.pairwise(begun)]
    assert begun[0] == pytest.approx(600, rel=0.05)
    assert gaps[0] == pytest.approx(best_interval(save, 3600 * hours), rel=0.08)
    assert max(gaps) <= 1.1 * gaps[0]
    (line,) = notices  # two saves that take about as long change nothing
    assert line.startswith("checkpoints every ")


def test_steps_that_become_slower_are_noticed() -> None:
    clock, now = SaveClock(Interval(seconds=600.0), step=0), 0.0
    for step in range(1, 10_000):
        now += 0.1 if step < 1000 else 10.0
        if step >= clock.next_look and clock.is_due(step, now):
            break
    assert 590 <= now <= 600 + 50 * 10


def test_after_a_failure_the_next_try_by_time_comes_within_a_minute() -> None:
    clock = SaveClock(Interval(seconds=600.0), step=0)
    clock.is_due(1, 0.0)
    assert clock.is_due(700, 700.0)
    clock.failed()
    due = [step for step in range(701, 800) if step >= clock.next_look and clock.is_due(step, float(step))]
    assert 750 <= due[0] <= 770


def test_both_and_neither() -> None:
    assert saves_of(Interval(seconds=100.0, steps=30), step_seconds=1.0, steps=100)[0] == [30, 60, 90]
    assert not Interval().is_set
