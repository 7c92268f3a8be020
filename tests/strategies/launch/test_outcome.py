"""The outcome of a run is judged from what its processes left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies.launch.failure_causes import ending_of
from strategies.launch.report import Outcome, outcome_of
from strategies.run_directory.files import RESULT_FILE, failure_path, log_path, write_json


def judge(directory: Path, status: int) -> Outcome:
    return outcome_of(ending_of(directory, status))


def _failed(directory: Path, codes: dict[int, int]) -> None:
    write_json(directory / RESULT_FILE, {"failures": codes})


def _write_failure(directory: Path, rank: int, kind: str, message: str, *, expected: bool = False) -> None:
    write_json(failure_path(directory, rank), {"type": kind, "message": message, "expected": expected})


def test_the_rank_that_failed_by_itself_is_named_and_not_the_one_stopped_for_it(tmp_path: Path) -> None:
    _failed(tmp_path, {0: -15, 1: 1})
    _write_failure(tmp_path, 1, "ValueError", "bad thing")
    outcome = judge(tmp_path, 1)
    assert (outcome.name, outcome.exit_code, outcome.rank) == ("failed", 1, 1)
    assert outcome.reason == "ValueError: bad thing"
    assert outcome.log == log_path(tmp_path, 1, "stderr")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory: Buy new RAM! Cannot allocate memory",
    ],
)
def test_out_of_memory_is_told_apart(message: str, tmp_path: Path) -> None:
    _failed(tmp_path, {0: 1})
    _write_failure(tmp_path, 0, "RuntimeError", message)
    assert judge(tmp_path, 1).name == "out_of_memory"


def test_a_killed_rank_is_said_to_be_killed(tmp_path: Path) -> None:
    _failed(tmp_path, {1: -9})
    outcome = judge(tmp_path, 1)
    assert (outcome.name, outcome.rank) == ("failed", 1)
    assert "signal 9" in outcome.reason


def test_expected_failures_keep_their_exit_status_and_lose_their_type(tmp_path: Path) -> None:
    _failed(tmp_path, {0: 2})
    _write_failure(tmp_path, 0, "UnknownName", "unknown strategy 'x'", expected=True)
    outcome = judge(tmp_path, 1)
    assert (outcome.exit_code, outcome.reason) == (2, "unknown strategy 'x'")


def test_that_no_plan_fits_is_a_refusal_with_the_status_of_what_does_not_fit(tmp_path: Path) -> None:
    _failed(tmp_path, {0: 1})
    _write_failure(tmp_path, 0, "NothingFits", "no plan fits this machine", expected=True)
    assert judge(tmp_path, 1).exit_code == 1


def test_the_last_line_of_the_log_speaks_for_a_rank_that_just_exited(tmp_path: Path) -> None:
    _failed(tmp_path, {0: 7})
    log_path(tmp_path, 0, "stderr").write_text("first\nlast words\n\n")
    assert judge(tmp_path, 1).reason == "last words"


def test_an_agent_that_died_points_at_its_own_log(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text("ImportError: no torch\n")
    outcome = judge(tmp_path, 1)
    assert (outcome.rank, outcome.reason, outcome.log) == (None, "ImportError: no torch", tmp_path / "agent.log")
