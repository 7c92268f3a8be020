"""Who is behind in a hang, what counts as getting on, and what a hung process leaves."""

from __future__ import annotations

import faulthandler
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from strategies.distributed.rank_check import Patience, Presence, check_ranks
from strategies.run_directory.heartbeat import PULSE, Pulse
from strategies.supervision.hang_detection import (
    Activity,
    Heartbeat,
    Verdict,
    Watchdog,
    judge,
    read_heartbeat,
    read_verdict,
    slowest,
)

ROOT = Path(__file__).resolve().parents[3]


def beat(rank: int, number: int = 1, **values: Any) -> Heartbeat:
    defaults = {"pid": 100 + rank, "host": "node1", "step": 11, "calls": 50, "section": "backward"}
    return Heartbeat(**{**defaults, "rank": rank, "number": number, "quiet_seconds": 60.0, "time": 0.0, **values})


def test_a_rank_whose_heart_stands_still_is_the_one() -> None:
    verdict = judge({0: beat(0), 1: beat(1)}, {0: beat(0, 2), 1: beat(1)}, quiet_seconds=60)
    assert verdict is not None
    assert (verdict.behind, verdict.silent) == ((1,), (1,))
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
        ({"section": ""}, (1,), "rank 1 is outside the engine and the others wait"),
        ({}, (0, 1), "all ranks stand in 'backward'"),
    ],
)
def test_the_rank_with_the_fewest_calls_is_the_one(other: dict[str, Any], behind: tuple[int, ...], where: str) -> None:
    verdict = judge({0: beat(0), 1: beat(1, **other)}, {0: beat(0, 2), 1: beat(1, 2, **other)}, quiet_seconds=60)
    assert verdict is not None
    assert verdict.behind == behind
    assert verdict.sentence == f"no progress for 60 s in step 12: {where}"


def test_before_the_ranks_have_met_the_one_that_is_waited_for_is_behind(tmp_path: Path) -> None:
    store = HashStore()
    store.set("rank-0", "here, and silent from now on")
    own = Presence(rank=1, world_size=2, host="node1", process_id=1, local_rank=1, device="cpu")
    watchdog = Watchdog(tmp_path, 1, 9.0)
    waits = threading.Thread(target=check_ranks, args=(store, own, Patience(60.0)))
    waits.start()
    try:
        while not PULSE.waits_for:
            time.sleep(0.01)
        verdict = watchdog._verdict(120.0)
    finally:
        store.set("verdict", "agreed")
        waits.join()
    assert verdict == Verdict(behind=(0,), sentence="rank 0 does not answer, and the ranks have not met")
    alone = watchdog._verdict(120.0)
    assert alone == Verdict(behind=(1,), sentence="no progress for 2 min")
    faulthandler.unregister(signal.SIGUSR2)
    watchdog._stacks.close()


def test_ranks_that_wait_for_one_that_works_are_not_hung() -> None:
    now = {0: beat(0, 2), 1: beat(1, 2, calls=40, section="", quiet_seconds=3.0)}
    assert judge({0: beat(0), 1: beat(1)}, now, quiet_seconds=60) is None
    assert slowest(now, 180).behind == (1,)


def test_notes_survive_the_board() -> None:
    assert read_heartbeat(beat(1).text()) == beat(1)
    assert read_heartbeat("{") is None
    assert read_heartbeat(None) is None
    verdict = Verdict(behind=(1,), sentence="so", silent=(1,))
    assert read_verdict(verdict.text()) == verdict
    assert read_verdict(None) is None


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(range(50))


def test_work_outside_the_engine_is_activity_and_sleep_is_none() -> None:
    pulse = Pulse()
    pulse.step = 5
    activity = Activity(pulse)
    activity.is_there(with_children=False)
    import threading

    seen: list[bool] = []
    looker = threading.Thread(target=lambda: (time.sleep(0.3), seen.append(activity.is_there(with_children=False))))
    looker.start()
    _spin(0.4)
    looker.join()
    assert seen == [True]
    looker = threading.Thread(target=lambda: _look_twice(activity, seen))
    looker.start()
    time.sleep(1.0)
    looker.join()
    assert seen[-1] is False


def _look_twice(activity: Activity, seen: list[bool]) -> None:
    time.sleep(0.2)
    activity.is_there(with_children=False)
    time.sleep(0.4)
    seen.append(activity.is_there(with_children=False))


def test_the_pulse_a_rest_and_the_work_of_children_are_activity() -> None:
    pulse = Pulse()
    activity = Activity(pulse)
    activity.is_there(with_children=True)
    pulse.call()
    assert activity.is_there(with_children=True)
    with pulse.resting():
        assert activity.is_there(with_children=True)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        activity._children_work(0.0, look=True)
        deadline = time.monotonic() + 30
        while not activity._children_work(0.5, look=True):
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        child.kill()
        child.wait()


def test_a_process_alone_that_sleeps_is_ended_with_its_stacks(tmp_path: Path) -> None:
    body = """
        import sys, time
        from pathlib import Path
        from strategies.run_directory import claim
        from strategies.supervision import hang_detection
        with claim.use("dsplan"):
            pass
        hang_detection._ALONE_SECONDS = 0.0
        hang_detection._ASIDE_SECONDS = 0.0
        hang_detection.begin_watching(Path(sys.argv[1]), 0, 1.0)
        hang_detection.PULSE.step = 7
        def stands_still():
            time.sleep(60)
        stands_still()
    """
    command = [sys.executable, "-c", textwrap.dedent(body), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    failure = json.loads((tmp_path / "rank0.failure.json").read_text())
    assert (failure["kind"], failure["step"], failure["behind"]) == ("hung", 7, [0])
    assert failure["message"] in ended.stderr
    assert "in stands_still" in (tmp_path / "rank0.stacks.txt").read_text()
