"""Real processes on one database: nothing is lost, whoever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hardware_db.store import open_store
from tests.hardware_db.store.processes import PROCESSES, WRITES
from tests.hardware_db.store.records import measurement

BODIES = Path(__file__).with_name("processes.py")


def _start(body: str, path: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(BODIES), body, str(path), str(number)], stderr=subprocess.PIPE, text=True
    )


def _run_all(body: str, path: Path) -> None:
    processes = [_start(body, path, number) for number in range(PROCESSES)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [(process.returncode, error) for process, error in zip(processes, errors, strict=True)] == [
        (0, "")
    ] * PROCESSES


@pytest.mark.slow
def test_eight_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    _run_all("write_many", path)
    with open_store(path) as store:
        runs = store.list()
    assert Counter(run.measured.host_bytes for run in runs) == dict.fromkeys(range(PROCESSES), WRITES)
    assert len({(run.measured.host_bytes, run.measured.steps) for run in runs}) == PROCESSES * WRITES


def test_eight_processes_lose_no_run_no_rate_and_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    _run_all("write_all_kinds", path)
    _check_all_kinds(path)


def test_eight_processes_find_one_damaged_database_and_lose_nothing_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    with open_store(path) as store:
        store.add(*(measurement(number) for number in range(1, 60)))
    content = bytearray(path.read_bytes())
    content[40960:45056] = b"\xff" * 4096
    path.write_bytes(content)
    processes = [_start("write_all_kinds", path, number) for number in range(PROCESSES)]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert len([line for line in "".join(told).splitlines() if "was damaged" in line]) == 1
    assert len(list(path.parent.glob("dsplan.db.damaged-*[0-9]"))) == 1
    _check_all_kinds(path)


def _check_all_kinds(path: Path) -> None:
    with open_store(path) as store:
        runs, rates, calibrations = store.list(), store.rates(), store.calibrations()
    everything = {(number, step) for number in range(PROCESSES) for step in range(WRITES)}
    assert {(run.measured.host_bytes, run.measured.steps) for run in runs if run.measured.host_bytes is not None} == (
        everything
    )
    assert {(rate.ranks - 1, rate.value) for rate in rates} == everything
    assert {
        (int(calibration.hardware.device[-1]), calibration.document["rows"]) for calibration in calibrations
    } == everything


@pytest.mark.slow
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
