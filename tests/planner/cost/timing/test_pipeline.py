"""The 1F1B schedule against the operation-by-operation simulation of its definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.timing.pipeline import one_forward_one_backward

TIMES = st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(1, 3)), min_size=2, max_size=6)


def by_operation(forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float) -> float:
    """Every stage does its list of operations in order, each when its input is there."""
    stages = len(forwards)
    lists = [_operations(min(micro_batches, stages - stage), micro_batches) for stage in range(stages)]
    ended: dict[tuple[str, int, int], float] = {}
    free, left = [0.0] * stages, sum(map(len, lists))
    while left:
        for stage, todo in enumerate(lists):
            while todo:
                kind, index = todo[0]
                ends = (kind, stage) in (("F", 0), ("B", stages - 1))
                neighbour = stage - 1 if kind == "F" else stage + 1
                source = ("F", stage, index) if kind == "B" and ends else (kind, neighbour, index)
                if source not in ended and (kind, stage) != ("F", 0):
                    break
                arrival = ended.get(source, 0.0) + (0.0 if ends else hop)
                free[stage] = max(free[stage], arrival) + (forwards if kind == "F" else backwards)[stage]
                ended[kind, stage, index] = free[stage]
                todo.pop(0)
                left -= 1
    return max(free)


def _operations(warm_up: int, micro_batches: int) -> list[tuple[str, int]]:
    operations = [("F", index) for index in range(warm_up)]
    for index in range(micro_batches):
        operations.append(("B", index))
        if warm_up + index < micro_batches:
            operations.append(("F", warm_up + index))
    return operations


def test_equal_stages_wait_for_all_others_once() -> None:
    assert one_forward_one_backward([1.0] * 4, [2.0] * 4, 8) == pytest.approx((8 + 3) * 3)


def test_a_single_micro_batch_passes_every_stage_twice() -> None:
    assert one_forward_one_backward([1.0, 2.0], [3.0, 4.0], 1, hop=0.5) == pytest.approx(11)


@settings(max_examples=150, deadline=None)
@given(times=TIMES, micro_batches=st.integers(1, 24), hop=st.sampled_from([0.0, 0.1, 0.5]))
def test_the_waves_are_the_schedule(times: list[tuple[float, float]], micro_batches: int, hop: float) -> None:
    forwards, backwards = zip(*times, strict=True)
    schedule = one_forward_one_backward(forwards, backwards, micro_batches, hop)
    assert schedule == pytest.approx(by_operation(forwards, backwards, micro_batches, hop))


@settings(max_examples=60, deadline=None)
@given(times=TIMES, micro_batches=st.integers(10, 80), hop=st.sampled_from([0.0, 0.1, 0.5]))
def test_many_micro_batches_take_the_period_each(
    times: list[tuple[float, float]], micro_batches: int, hop: float
) -> None:
    forwards, backwards = zip(*times, strict=True)
    schedule = one_forward_one_backward(forwards, backwards, micro_batches, hop)
    # 1.1 % was the most in 6000 random schedules.
    assert schedule == pytest.approx(by_operation(forwards, backwards, micro_batches, hop), rel=0.02)


@pytest.mark.parametrize("stages", [10, 16, 32])
@pytest.mark.parametrize("micro_batches", [4, 16, 128])
@pytest.mark.parametrize(("more", "head"), [(0, 0.5), (6, 0.0), (8, 1.0)])
def test_a_long_pipeline_takes_its_longest_path(stages: int, micro_batches: int, more: int, head: float) -> None:
    """Stages between the ends with a block more, as 61 or 126 blocks make them."""
    layers = [4 + (0 < stage <= more) for stage in range(stages)]
    forwards, backwards = [1.0 * count for count in layers], [2.5 * count for count in layers]
    forwards[-1] += head
    backwards[-1] += 2 * head
    schedule = one_forward_one_backward(forwards, backwards, micro_batches, hop=0.02)
    exact = by_operation(forwards, backwards, micro_batches, 0.02)
    assert 0.95 * exact <= schedule <= exact * (1 + 1e-9)
