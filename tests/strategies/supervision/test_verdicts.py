"""For whom the ranks of a hung run wait, from their heartbeats; and which of several verdicts is believed."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.supervision.verdicts import (
    Heartbeat,
    Verdict,
    answer,
    judge,
    read_heartbeat,
    read_verdict,
    slowest,
    weigh,
)


def beat(rank: int, number: int = 1, **values: Any) -> Heartbeat:
    defaults = {"pid": 100 + rank, "host": "node1", "step": 11, "calls": 50, "section": "backward"}
    return Heartbeat(**{**defaults, "rank": rank, "number": number, "quiet_seconds": 60.0, "time": 0.0, **values})


def test_a_rank_whose_heart_stands_still_is_the_one() -> None:
    verdict = judge({0: beat(0), 1: beat(1)}, {0: beat(0, 2), 1: beat(1)}, quiet_seconds=60)
    assert verdict is not None
    assert (verdict.behind, verdict.silent) == ((1,), {1: 1})
    assert verdict.sentence == (
        "rank 1 does not answer: stopped, or stuck in native code (process 101 on node1); the others wait"
    )


def test_a_rank_that_was_never_heard_of_is_the_one() -> None:
    verdict = judge({0: beat(0), 1: None}, {0: beat(0, 2), 1: None}, quiet_seconds=60)
    assert verdict is not None
    assert verdict.behind == (1,)


@pytest.mark.parametrize(
    ("other", "behind", "where"),
    [
        ({"calls": 48, "section": ""}, (1,), "rank 1 is outside the engine and the others wait"),
        ({"calls": 52, "section": ""}, (0,), "rank 0 is in 'backward' and the others wait"),
        ({"section": "", "has_engine": False}, (1,), "rank 1 is in the script's own code and the others wait"),
        ({"section": ""}, (1,), "rank 1 is outside the engine and the others wait"),
        ({}, (0, 1), "all ranks stand in 'backward'"),
    ],
)
def test_the_rank_with_the_fewest_calls_is_the_one(other: dict[str, Any], behind: tuple[int, ...], where: str) -> None:
    verdict = judge({0: beat(0), 1: beat(1, **other)}, {0: beat(0, 2), 1: beat(1, 2, **other)}, quiet_seconds=60)
    assert verdict is not None
    assert verdict.behind == behind
    assert verdict.sentence == f"no progress for 60 s in step 12: {where}"


def test_ranks_that_wait_for_one_that_works_are_not_hung() -> None:
    now = {0: beat(0, 2), 1: beat(1, 2, calls=40, section="", quiet_seconds=3.0)}
    assert judge({0: beat(0), 1: beat(1)}, now, quiet_seconds=60) is None
    assert slowest(now, 180).behind == (1,)


def test_notes_survive_the_board() -> None:
    assert read_heartbeat(beat(1).text()) == beat(1)
    assert read_heartbeat("{") is None
    assert read_heartbeat(None) is None
    verdict = Verdict(behind=(1,), sentence="so", silent={1: 4})
    assert read_verdict(verdict.text()) == verdict
    assert read_verdict(None) is None


OUTSIDE = Verdict(behind=(1,), sentence="rank 1 is outside the engine and the others wait")
SILENT = Verdict(behind=(0,), sentence="rank 0 does not answer", silent={0: 20})


@pytest.mark.parametrize(
    ("verdicts", "numbers", "believed"),
    [
        ({0: OUTSIDE, 1: SILENT}, {}, [0]),  # rank 0 has reported, before or since
        ({1: SILENT, 0: OUTSIDE}, {0: 20}, [0]),
        ({1: SILENT, 2: OUTSIDE}, {0: 20}, [1, 2]),  # rank 0 has said nothing
        ({1: SILENT, 2: OUTSIDE}, {0: 21}, [2]),  # its heart has gone on
        ({1: SILENT}, {0: 21}, [1]),  # there is nothing else to believe
        ({1: SILENT, 2: SILENT}, {}, [1, 2]),
        ({0: SILENT, 1: SILENT, 2: OUTSIDE}, {0: 20}, [0, 1, 2]),  # it only repeats what it is accused of
    ],
)
def test_who_has_spoken_since_is_not_silent(
    verdicts: dict[int, Verdict], numbers: dict[int, int], believed: list[int]
) -> None:
    now = {rank: beat(rank, number) for rank, number in numbers.items()}
    assert weigh(verdicts, now) == {rank: verdicts[rank] for rank in believed}


def test_of_several_silent_ranks_those_are_left_that_have_not_spoken() -> None:
    both = Verdict(behind=(0, 2), sentence="ranks 0, 2 do not answer", silent={0: 20, 2: 20})
    assert weigh({1: both}, {0: beat(0, 21), 2: beat(2, 20)})[1].behind == (2,)


def test_a_rank_answers_only_what_is_wrong_of_it() -> None:
    now = {0: beat(0, 21), 1: beat(1, 20, section="", calls=49), 2: beat(2, 5)}
    assert answer(SILENT, 1, now, 60) == SILENT
    assert answer(SILENT, 0, now, 60).behind == (1,)
    both = Verdict(behind=(0, 2), sentence="ranks 0, 2 do not answer", silent={0: 20, 2: 5})
    assert answer(both, 0, now, 60).silent == {2: 5}
