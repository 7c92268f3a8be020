"""Real processes on one database: nothing is lost, whoever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from store_processes import PROCESSES, WRITES
from store_records import measurement

from hardware_db.store import open_store

BODIES = Path(__file__).with_name("store_processes.py")


def _start(body: str, path: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(BODIES), body, str(path), str(number)], stderr=subprocess.PIPE, text=True
    )


def _run_all(body: str, path: Path) -> None:
    processes = [_start(body, path, number) for number in range(PROCESSES)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [(one.returncode, error) for one, error in zip(processes, errors, strict=True)] == [(0, "")] * PROCESSES


def test_eight_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    _run_all("write_many", path)
    with open_store(path) as store:
        found = store.list()
    assert Counter(one.measured.host_bytes for one in found) == dict.fromkeys(range(PROCESSES), WRITES)
    assert len({(one.measured.host_bytes, one.measured.steps) for one in found}) == PROCESSES * WRITES


def test_eight_processes_can_make_one_database_at_once(tmp_path: Path) -> None:
    # Two processes that change the journal mode at once would deadlock, so sqlite fails one of them at once; whether it
    # happens is chance, one time in four on two cores, hence many turns.
    _run_all("make_many", tmp_path / "dsplan.db")


@pytest.mark.parametrize(("body", "left"), [("die_after_adding", 3), ("die_while_adding", 0)])
def test_a_killed_process_leaves_whole_transactions_and_no_lock(tmp_path: Path, body: str, left: int) -> None:
    path = tmp_path / "dsplan.db"
    killed = _start(body, path, 3)
    assert (killed.communicate(timeout=60)[1], killed.returncode) == ("", -signal.SIGKILL)
    with open_store(path) as store:
        assert store.count() == left
        assert store.add(measurement(1)) == 1
