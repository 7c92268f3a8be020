"""The rank that is behind in a hang, what counts as getting on, and what a hung process leaves."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from strategies.distributed.rank_check import Patience, Presence, check_ranks
from strategies.run_directory.heartbeat import PULSE, Pulse
from strategies.supervision import hang_detection
from strategies.supervision.hang_detection import Activity, Watchdog, is_waiting
from strategies.supervision.stopping import FileBoard
from strategies.supervision.verdicts import Verdict, read_heartbeat
from tests.strategies.supervision.test_verdicts import beat

ROOT = Path(__file__).resolve().parents[3]


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
        verdict = watchdog._judge(120.0)
    finally:
        store.set("verdict", "agreed")
        waits.join()
    assert verdict == Verdict(behind=(0,), sentence="rank 0 does not answer, and the ranks have not met")
    alone = watchdog._judge(120.0)
    assert alone == Verdict(behind=(1,), sentence="no progress for 2 min")
    faulthandler.unregister(signal.SIGUSR2)
    watchdog._stacks.close()


def test_work_outside_the_engine_is_activity_and_sleep_is_none() -> None:
    pulse = Pulse()
    pulse.step = 5
    activity = Activity(pulse)
    activity.is_there(with_children=False)
    import threading

    seen: list[bool] = []
    looker = threading.Thread(target=lambda: _look_until_there(activity, seen))
    looker.start()
    while looker.is_alive():
        sum(range(50))
    assert seen == [True]
    looker = threading.Thread(target=lambda: _look_twice(activity, seen))
    looker.start()
    looker.join()
    assert seen == [True, False]


def _look_until_there(activity: Activity, seen: list[bool]) -> None:
    deadline = time.monotonic() + 60
    while not activity.is_there(with_children=False):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    seen.append(True)


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


class Starved(FileBoard):
    """A board on which rank 0 publishes its next heartbeat only when rank 1 has looked at it so often."""

    def __init__(self, folder: Path, looks: int, *, reports: Verdict | None = None) -> None:
        super().__init__(folder)
        self._looks, self._reports = looks, reports
        self.put("beat-0", beat(0, 7).text())

    def get(self, key: str) -> str | None:
        """Return a note, after rank 0 has woken up where it is time."""
        self._looks -= key == "beat-0"
        if self._looks == 0:
            self.put("beat-0", beat(0, 8).text())
            if self._reports is not None:
                self.put("hung", self._reports.text())
        return super().get(key)


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Rank 1 of two, quiet in the script, whose looks are short."""
    monkeypatch.setattr(hang_detection, "PULSE", pulse := Pulse())
    pulse.step, pulse.calls = 11, 49
    watchdog = Watchdog(tmp_path, 1, 9.0)
    watchdog._active_at -= 60
    monkeypatch.setattr(watchdog, "_beat_seconds", 0.01)
    monkeypatch.setattr(watchdog, "_world_size", 2)
    monkeypatch.setattr(watchdog._activity, "is_there", lambda with_children: False)
    yield watchdog
    faulthandler.unregister(signal.SIGUSR2)
    watchdog._stacks.close()


def _judged(watchdog: Watchdog, board: FileBoard, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    monkeypatch.setattr(watchdog, "_board", board)
    monkeypatch.setattr(PULSE, "has_engine", False)
    watchdog._publish(60.0)
    verdict = watchdog._judge(60.0)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(("looks", "behind"), [(3, 1), (7, 1), (99, 0)])
def test_a_rank_that_was_only_starved_is_not_silent(
    looks: int, behind: int, watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = _judged(watchdog, Starved(tmp_path / "board", looks), monkeypatch)
    assert verdict.behind == (behind,)
    assert ("in the script's own code" in verdict.sentence) is (behind == 1)


def test_a_rank_publishes_heartbeats_while_it_looks_at_others(
    watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _judged(watchdog, board := FileBoard(tmp_path / "board"), monkeypatch)
    own = read_heartbeat(board.get("beat-1"))
    assert own is not None
    assert own.number > hang_detection._LOOKS


def test_what_another_rank_reports_meanwhile_counts(
    watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = Verdict(behind=(1,), sentence="rank 1 is outside the engine")
    assert _judged(watchdog, Starved(tmp_path / "board", 4, reports=reported), monkeypatch) == reported


def test_a_rank_that_reads_that_it_is_silent_answers_with_whom_all_wait_for(
    watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Verdict(behind=(1,), sentence="rank 1 does not answer", silent={1: 3})
    verdict = _judged(watchdog, Starved(tmp_path / "board", 4, reports=wrong), monkeypatch)
    assert verdict.silent == {}
    why = "rank 1 is in the script's own code and the others wait"
    assert verdict.sentence == f"no progress for 60 s in step 12: {why}"


@pytest.mark.parametrize("revives", [True, False])
def test_only_a_rank_that_stays_silent_is_killed(
    revives: bool, watchdog: Watchdog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = FileBoard(tmp_path / "board")
    with subprocess.Popen(["sleep", "60"]) as other:
        board.put("beat-0", beat(0, 7, pid=other.pid, host=socket.gethostname()).text())
        signals: list[int] = []
        monkeypatch.setattr(watchdog, "_board", board)
        monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
        monkeypatch.setattr(os, "_exit", lambda status: None)
        if revives:
            monkeypatch.setattr(time, "sleep", lambda _: board.put("beat-0", beat(0, 8).text()))
        else:
            monkeypatch.setattr(hang_detection, "_ASIDE_SECONDS", 0.0)
        watchdog._end_hung(Verdict(behind=(0,), sentence="so", silent={0: 7}))
        monkeypatch.undo()
        other.terminate()
    assert signals == [signal.SIGUSR2] + [signal.SIGKILL] * (not revives)


def test_a_rank_waits_where_the_module_is_torchs_and_not_where_a_file_is_called_so() -> None:
    code = compile("def stand(): return sys._getframe()", "zero/collectives.py", "exec")
    names: dict[str, Any] = {"sys": sys}
    exec(code, names)
    assert not is_waiting(names["stand"]())
    for name in hang_detection._WAITING:
        module = importlib.import_module(name)
        stand = types.FunctionType((lambda own_frame: own_frame()).__code__, vars(module), "stand", (sys._getframe,))
        assert is_waiting(stand()), name


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
    assert "in stands_still" in (tmp_path / "attempt0.rank0.stacks.txt").read_text()
    assert f"stacks in {tmp_path}/attempt0.rank0.stacks.txt" in ended.stderr
