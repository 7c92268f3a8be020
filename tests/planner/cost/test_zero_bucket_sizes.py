"""Our own ZeRO deals tensors out: to buckets, to the ranks that own them, and to the host."""

from __future__ import annotations

import pytest

from planner.cost.zero_bucket_sizes import OffloadRatio, bucket_members, owning_ranks


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((), 8, []),
        ((1, 2, 3), 8, [[0, 1, 2]]),
        ((4, 1, 9, 2), 8, [[0], [2], [1, 3]]),  # half the limit or more is alone
        ((3, 3, 3, 3), 8, [[0, 1], [2, 3]]),
    ],
)
def test_small_tensors_share_buckets(sizes: tuple[int, ...], limit: int, expected: list[list[int]]) -> None:
    assert bucket_members(sizes, limit) == expected


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((5, 5, 5), 1, [0, 0, 0]),
        ((1, 7, 3, 4), 2, [0, 0, 1, 1]),
        ((2, 2, 2), 4, [0, 1, 2]),  # of equals the first rank takes the first
    ],
)
def test_the_largest_tensors_choose_their_rank_first(sizes: tuple[int, ...], ranks: int, expected: list[int]) -> None:
    assert owning_ranks(sizes, ranks) == expected


def test_nearly_the_ratio_is_offloaded_after_every_bucket() -> None:
    ratio = OffloadRatio(0.4)
    assert [ratio.takes(1) for _ in range(10)] == [False, True, False, True, False, False, True, False, True, False]
