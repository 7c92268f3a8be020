"""The cause of an attempt's end, from what several ranks, their launcher and the kernel left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardware_db.probe.cgroup import memory_kills
from strategies.launch.failure_causes import ending_of, forget_last_attempt, remove_empty_stacks, with_stacks_as_log
from strategies.launch.policy import Policy, RunContext
from strategies.run_directory.files import (
    RESULT_FILE,
    failure_path,
    heartbeat_path,
    log_path,
    stacks_path,
    success_path,
    write_json,
)
from strategies.run_directory.spec import EndingKind
from tests.strategies.supervision.test_verdicts import beat

ECHO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3012"


def _result(directory: Path, codes: dict[int, int], **more: Any) -> None:
    write_json(directory / RESULT_FILE, {"failures": codes, **more})


def _write_failure(directory: Path, rank: int, kind: EndingKind, message: str = "why", **more: Any) -> None:
    failure = {"kind": kind, "type": "RuntimeError", "message": message, "expected": False, "host": "node1", **more}
    write_json(failure_path(directory, rank), failure)


def test_a_killed_rank_comes_before_what_its_peers_say_of_it(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1, 1: -9, 2: -15})
    _write_failure(tmp_path, 0, "failed", ECHO)
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.rank, ending.exit_status) == ("killed", 1, -9)


def test_an_exception_comes_before_a_peer_that_aborted(tmp_path: Path) -> None:
    _result(tmp_path, {0: -6, 1: 1})
    _write_failure(tmp_path, 1, "failed", "bad thing", step=7)
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.rank, ending.step, ending.host) == ("failed", 1, 7, "node1")


@pytest.mark.parametrize("kind", ["out_of_memory", "not_finite", "disk_full"])
def test_a_cause_comes_before_its_effects(kind: EndingKind, tmp_path: Path) -> None:
    _result(tmp_path, {0: 1, 1: 1, 2: -9})
    _write_failure(tmp_path, 0, "failed", "something else")
    _write_failure(tmp_path, 1, kind)
    assert (ending_of(tmp_path, 1).kind, ending_of(tmp_path, 1).rank) == (kind, 1)


def test_peers_that_only_lost_each_other_are_lost_in_few_words(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1})
    _write_failure(tmp_path, 0, "failed", f"{ECHO}. This is typically caused by a remote worker hanging. GLHF!")
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.reason) == ("lost", "RuntimeError: Connection closed by peer [127.0.0.1]:3012")


MISMATCH = "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 42 vs 40. \
Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"


@pytest.mark.parametrize(("last_line", "kind"), [(MISMATCH, "refused"), ("free(): invalid pointer\n", "killed")])
def test_a_rank_that_gloo_aborts_in_another_collective_is_not_started_again(
    last_line: str, kind: EndingKind, tmp_path: Path
) -> None:
    _result(tmp_path, {0: -6, 1: -15})
    log = log_path(tmp_path, 0, "stderr")
    log.parent.mkdir(exist_ok=True)
    log.write_text(last_line)
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.rank) == (kind, 0)
    assert ("called on all ranks" in ending.reason) is (kind == "refused")
    decision = Policy(3).decide(ending, RunContext(highest_step=8, progressed=True))
    assert (decision.action == "restart") is (kind == "killed")


@pytest.mark.parametrize(
    ("codes", "failure", "culprit"),
    [
        ({0: 1}, {"kind": "failed", "message": ECHO}, 1),
        ({0: 1, 2: -6}, {"kind": "failed", "message": ECHO}, 1),
        ({0: 1}, {"kind": "hung", "message": "rank 1 does not answer", "behind": [1]}, 1),
        ({0: 1}, {"kind": "hung", "message": "rank 2 does not answer", "behind": [2]}, 2),
        ({0: 1, 2: -9}, {"kind": "failed", "message": ECHO}, 2),
        ({0: 1}, {"kind": "failed", "message": "bad thing"}, 0),
    ],
)
def test_a_rank_that_ended_well_too_early_is_named_where_the_others_only_miss_it(
    codes: dict[int, int], failure: dict[str, Any], culprit: int, tmp_path: Path
) -> None:
    _result(tmp_path, codes)
    _write_failure(tmp_path, 0, step=8, **failure)
    write_json(success_path(tmp_path, 1), {"step": 7, "host": "node2", "time": 5.0})
    write_json(success_path(tmp_path, 3), {"step": 8, "host": "node2", "time": 6.0})
    ending = ending_of(tmp_path, 1)
    assert ending.rank == culprit
    if culprit == 1:
        assert (ending.kind, ending.step, ending.host, ending.exit_status) == ("failed", 7, "node2", 0)
        assert ending.reason == "ended with status 0 at step 7 while the others were training"
        repeated = Policy(3)
        decisions = [repeated.decide(ending, RunContext(highest_step=8, progressed=at == 0)) for at in range(2)]
        assert [decision.action for decision in decisions] == ["restart", "give_up"]
    forget_last_attempt(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_connection_of_the_script_comes_before_the_peers_that_its_end_has_left(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1, 1: 1})
    _write_failure(tmp_path, 0, "lost", ECHO)
    _write_failure(tmp_path, 1, "lost", "the data's server went away", type="ConnectionResetError")
    ending = ending_of(tmp_path, 1)
    assert (ending.rank, ending.reason) == (1, "ConnectionResetError: the data's server went away")


def test_the_rank_that_is_behind_is_at_fault_for_a_hang(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1, 1: -9})
    _write_failure(tmp_path, 0, "hung", "no progress for 9 s", behind=[1])
    stacks_path(tmp_path, 0, 4).touch()
    stacks_path(tmp_path, 1, 4).write_text("Thread 1")
    remove_empty_stacks(tmp_path, 4)
    ending = with_stacks_as_log(ending_of(tmp_path, 1), tmp_path, 4)
    assert (ending.kind, ending.rank) == ("hung", 1)
    assert ending.log is not None
    assert ending.log.read_text() == "Thread 1"
    forget_last_attempt(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["attempt4.rank1.stacks.txt"]


def test_a_kill_is_out_of_memory_where_the_kernel_says_so(tmp_path: Path) -> None:
    _result(tmp_path, {1: -9})
    assert ending_of(tmp_path, 1).kind == "killed"
    ending = ending_of(tmp_path, 1, memory_killed=True)
    assert (ending.kind, ending.rank) == ("out_of_memory", 1)


def test_a_stop_on_purpose_is_no_failure_although_a_late_rank_was_ended(tmp_path: Path) -> None:
    _result(tmp_path, {0: 75, 1: -15})
    _write_failure(tmp_path, 0, "preempted", "saved", saved="/x/step-00000003")
    assert (ending_of(tmp_path, 1).kind, ending_of(tmp_path, 1).saved) == ("preempted", "/x/step-00000003")


def test_the_launcher_knows_of_other_nodes(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1}, kind="lost", reason="node2 does not answer", node="node2")
    _write_failure(tmp_path, 0, "failed", "something")
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.host, ending.rank, ending.reason) == ("lost", "node2", None, "node2 does not answer")


def test_the_launcher_calls_a_stop_by_another_name(tmp_path: Path) -> None:
    _result(tmp_path, {0: 75}, kind="regrouped")
    _write_failure(tmp_path, 0, "preempted", "saved", saved="/x", step=3)
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.saved, ending.step) == ("regrouped", "/x", 3)


@pytest.mark.parametrize(("status", "number"), [(-9, 9), (137, 9), (143, 15), (129, 1), (192, 64)])
def test_a_killed_launcher_is_killed(status: int, number: int, tmp_path: Path) -> None:
    ending = ending_of(tmp_path, status)
    assert (ending.kind, ending.rank, ending.exit_status) == ("killed", None, -number)
    assert ending.reason == f"the launcher was killed by signal {number}"


@pytest.mark.parametrize(("status", "kind"), [(-9, "out_of_memory"), (137, "out_of_memory"), (143, "killed")])
def test_a_launcher_killed_for_memory(status: int, kind: EndingKind, tmp_path: Path) -> None:
    assert ending_of(tmp_path, status, memory_killed=True).kind == kind


@pytest.mark.parametrize("status", [1, 127, 128, 193, 255])
def test_a_launcher_with_a_status_of_its_own_has_failed(status: int, tmp_path: Path) -> None:
    ending = ending_of(tmp_path, status)
    assert (ending.kind, ending.exit_status) == ("failed", status)


def test_a_failure_file_cut_short_is_no_failure_of_ours(tmp_path: Path) -> None:
    _result(tmp_path, {0: 1})
    failure_path(tmp_path, 0).write_text('{"kind": "fai')
    assert ending_of(tmp_path, 1).reason == "exit status 1"


@pytest.mark.parametrize(
    ("own", "counter"),
    [
        ("0::/job\n", "job/memory.events"),
        ("0::/kubepods/of/the/host\n", "memory.events"),
        ("5:cpu:/x\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
    ],
)
def test_the_kernel_counts_its_kills(own: str, counter: str, tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    assert memory_kills(tmp_path) == 0
    path = tmp_path / "sys/fs/cgroup" / counter
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 4\noom_kill 3\n")
    assert memory_kills(tmp_path) == 3


def test_no_counter(tmp_path: Path) -> None:
    assert memory_kills(tmp_path) == 0


OUTSIDE = {"message": "rank 1 is outside the engine", "behind": [1], "expected": True}
SILENT = {"message": "rank 0 does not answer", "behind": [0], "silent": {"0": 20}, "expected": True}


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_reported_itself_is_not_believed_to_be_stuck(first: int, tmp_path: Path) -> None:
    _result(tmp_path, {first: 1, 1 - first: -15})
    for rank in (first, 1 - first):
        _write_failure(tmp_path, rank, "hung", **(SILENT if rank else OUTSIDE))
    ending = ending_of(tmp_path, 1)
    assert (ending.kind, ending.rank, ending.reason) == ("hung", 1, OUTSIDE["message"])


@pytest.mark.parametrize(("number", "culprit"), [(20, 0), (21, 1)])
def test_a_rank_whose_heart_went_on_is_not_believed_to_be_stuck(number: int, culprit: int, tmp_path: Path) -> None:
    _result(tmp_path, {1: 1, 2: 1})
    _write_failure(tmp_path, 1, "hung", **SILENT)
    _write_failure(tmp_path, 2, "hung", **OUTSIDE)
    heartbeat_path(tmp_path, 0).write_text(beat(0, number).text())
    assert ending_of(tmp_path, 1).rank == culprit
