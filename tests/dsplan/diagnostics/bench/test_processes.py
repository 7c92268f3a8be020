"""Benchmarks that are killed, and many at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from hardware_db.microbench.grid import point_of
from hardware_db.store import open_store
from tests.dsplan.diagnostics.bench.command import ended, plan_file, start_bench
from tests.dsplan.diagnostics.bench.samples import launches

PROCESSES = 8


def stored() -> list[object]:
    """The points in the database of this test."""
    with open_store() as store:
        return [point_of(rate) for rate in store.rates()]


def children(pid: int) -> set[int]:
    """Processes that a process started."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                pids.add(int(entry.name))
    return pids


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_benchmark_resumes_where_it_was(tmp_path: Path, dsplan_home: Path) -> None:
    points = launches(30, ranks=2)
    plan = plan_file(tmp_path, points)
    killed = start_bench("--plan", plan, "--json", cwd=tmp_path)
    wait_until(lambda: (dsplan_home / "dsplan.db").exists() and len(stored()) >= 2)
    ranks = children(killed.pid)
    assert len(ranks) >= 2
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = len(stored())
    assert 2 <= before < len(points)
    wait_until(lambda: not any(map(is_alive, ranks)))

    second = ended(start_bench("--plan", plan, "--json", cwd=tmp_path))
    assert second["stored_before"] == before
    assert len(second["measured"]) == len(points) - before
    assert (second["refused"], second["left"]) == ([], 0)
    assert Counter(stored()) == Counter(points)

    third = ended(start_bench("--plan", plan, "--json", cwd=tmp_path))
    assert (third["stored_before"], third["measured"]) == (len(points), [])


@pytest.mark.slow
def test_an_interrupted_benchmark_says_how_to_resume(tmp_path: Path, dsplan_home: Path) -> None:
    points = launches(30, ranks=2)
    stopped = start_bench("--plan", plan_file(tmp_path, points), "--json", cwd=tmp_path)
    wait_until(lambda: (dsplan_home / "dsplan.db").exists() and len(stored()) >= 2)
    ranks = children(stopped.pid)
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=60)
    assert (stopped.returncode, out) == (130, "")
    assert err == "stopped; what was measured is stored, and the same command resumes from there\n"
    assert 2 <= len(stored()) < len(points)
    wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.parametrize("count", [3, pytest.param(PROCESSES, marks=pytest.mark.slow)])
def test_benchmarks_at_once_share_the_work_and_lose_nothing(count: int, tmp_path: Path) -> None:
    points = launches(6)
    plan = plan_file(tmp_path, points)
    processes = [start_bench("--plan", plan, "--json", cwd=tmp_path) for _ in range(count)]
    reports = [ended(process) for process in processes]
    assert Counter(stored()) == Counter(points)
    assert sum(len(report["measured"]) for report in reports) == len(points)
    for report in reports:
        assert len(report["measured"]) + report["measured_by_others"] + report["stored_before"] == len(points)


@pytest.mark.slow
def test_eight_benchmarks_that_measure_everything_anew_lose_nothing(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, launches(1))
    processes = [start_bench("--plan", plan, "--json", "--again", cwd=tmp_path) for _ in range(PROCESSES)]
    ids = [record["id"] for process in processes for record in ended(process)["measured"]]
    with open_store() as store:
        assert sorted(rate.id for rate in store.rates()) == sorted(ids)
    assert len(set(ids)) == PROCESSES


def test_a_database_that_cannot_be_used_is_reported_before_anything_is_measured(
    tmp_path: Path, dsplan_home: Path
) -> None:
    dsplan_home.mkdir(exist_ok=True)
    (dsplan_home / "dsplan.db").write_text("no database")
    with pytest.raises(DsplanError):
        open_store()
    process = start_bench("--plan", plan_file(tmp_path, launches(1)), cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("dsplan: ")
    assert err.count("\n") == 1
