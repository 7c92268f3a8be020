"""Words of a rank on its end, what a script keeps for itself, and the checkpoints that a run knows."""

from __future__ import annotations

import errno
import json
import os
import runpy
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from hardware_db.errors import DsplanError
from planner.errors import NothingFits
from strategies.errors import BrokenFile, CannotRun
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import LINEAGE_FILE, success_path
from strategies.supervision import lineage, process, stopping
from strategies.supervision.failures import (
    NotFinite,
    attempt_of,
    exit_status,
    failure_of,
    kind_of,
    read_failure,
    write_failure,
    write_success,
)
from strategies.supervision.stopping import FileBoard, Request, Stopping, StopSignal
from strategies.supervision.supervision import reads_client_state


def _from(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as problem:
            raise ValueError("the script's own words") from problem
    except ValueError as error:
        return error


def _joint() -> DsplanError:
    error = DsplanError("rank 1 failed: ZeroDivisionError: division by zero")
    error.exit_code = 1
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            "out_of_memory",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out_of_memory"),
        (_from(MemoryError()), "out_of_memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out_of_memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (BrokenFile("x", "cannot be written (No space left on device)"), "disk_full"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33509"), "lost"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "lost"),
        (NotFinite("losses are NaN"), "not_finite"),
        (CannotRun("config: no"), "refused"),
        (CannotRun("a plan that would run out of memory"), "refused"),
        (NothingFits("no plan fits this machine"), "refused"),
        (_joint(), "failed"),
        (ZeroDivisionError("division by zero"), "failed"),
        (KeyError("out of memory"), "failed"),
    ],
)
def test_an_exception_is_recognised(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_the_first_word_of_a_rank_is_its_last(tmp_path: Path) -> None:
    first = failure_of(CannotRun("config: no such key\nmore"), tmp_path)
    write_failure(tmp_path, 3, first)
    write_failure(tmp_path, 3, failure_of(ValueError("an effect"), tmp_path))
    failure = read_failure(tmp_path, 3)
    assert failure is not None
    assert (failure["kind"], failure["message"], failure["expected"]) == ("refused", "config: no such key", True)
    assert exit_status(first) == 2
    assert exit_status(failure_of(ValueError("x"), tmp_path)) == 1
    assert read_failure(tmp_path, 0) is None


def test_what_a_rank_cannot_write_or_read_of_its_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (attempt_of(tmp_path), capsys.readouterr().err) == (0, "")  # nobody counts here
    monkeypatch.setattr(AttemptOptions, "load", Mock(side_effect=OSError("stale file handle")))
    assert attempt_of(tmp_path) == 0
    assert "options of this attempt cannot be read" in capsys.readouterr().err
    write_success(tmp_path / "gone", 3)
    assert "that rank 3 completed could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "reads"),
    [
        ("path, state = engine.load_checkpoint('d')\nstart = state['step']", True),
        ("path, state = engine.load_checkpoint('d')\nprint(path)", False),
        ("path, _ = engine.load_checkpoint('d')", False),
        ("engine.load_checkpoint('d')", False),
        ("start = engine.load_checkpoint('d')[1]['step']", True),
        ("path = engine.load_checkpoint('d')[0]", False),
        ("if True:\n    _, sd = model.load_checkpoint(a, b)\n    f(sd)", True),
        ("not python(", False),
    ],
)
def test_a_script_that_reads_client_state_is_known_by_its_source(tmp_path: Path, script: str, reads: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    assert reads_client_state(path) is reads


def test_a_run_knows_its_checkpoints_and_only_complete_ones_count(tmp_path: Path) -> None:
    for step, exists in ((5, True), (10, True), (15, False)):
        path = tmp_path / f"step-{step}"
        if exists:
            path.mkdir()
        lineage.note(tmp_path, lineage.RunCheckpoint(path=str(path), step=step, is_automatic=step != 5))
    with (tmp_path / LINEAGE_FILE).open("a") as file:
        file.write('{"path": "cut sho')
    checkpoints = lineage.read(tmp_path)
    assert [checkpoint.step for checkpoint in checkpoints] == [5, 10, 15]
    assert [checkpoint.step for checkpoint in lineage.newest_first(checkpoints)] == [10, 5]
    assert lineage.outdated(checkpoints, 0) == [tmp_path / "step-10"]
    assert lineage.outdated(checkpoints, 1) == []


def test_ranks_out_of_step_agree_on_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks as threads that meet in every step, as in a collective, and whose watchdogs look at different times."""
    monkeypatch.setattr(stopping, "STOP_SIGNAL", StopSignal())
    board, barrier = FileBoard(tmp_path / "board"), threading.Barrier(2)
    ranks = [Stopping(board, rank, 2) for rank in range(2)]
    board.put("stop", json.dumps({"kind": "preempted", "seconds": 60.0}))
    stopped_at: dict[int, int] = {}

    def train(rank: int) -> None:
        for step in range(1, 200):
            barrier.wait()
            if step == 5 + 7 * rank:  # the watchdogs look when they like
                ranks[rank].poll()
            if ranks[rank].is_at(step):
                stopped_at[rank] = step
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert stopped_at[0] == stopped_at[1]
    assert 12 < stopped_at[0] <= 14
    request = ranks[1].request
    assert request is not None
    assert request.kind == "preempted"


def test_the_first_request_counts() -> None:
    signal = StopSignal()
    signal.ask("switch", 5.0)
    signal.ask("preempted", 1.0)
    assert isinstance(signal.request, Request)
    assert signal.request.kind == "switch"
    assert signal.request.deadline > time.monotonic() + 1.0


def test_what_wants_a_gpu_is_a_refusal_that_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n    raise AssertionError('Torch not compiled with CUDA enabled')\nmain()\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AssertionError) as caught:
        runpy.run_path(str(script))
    failure = failure_of(caught.value, tmp_path)
    assert (failure.kind, failure.expected, exit_status(failure)) == ("refused", True, 2)
    assert failure.message.startswith("train.py, line 2: asks for CUDA, and torch can use no GPU here; ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert failure_of(caught.value, tmp_path).kind == "failed"


def test_a_script_that_ends_by_os_exit_leaves_word_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Mock()
    monkeypatch.setattr(os, "_exit", ended)
    process.leave_word_at_exit(tmp_path, 1)
    os._exit(3)
    assert not success_path(tmp_path, 1).exists()
    os._exit(0)
    word = success_path(tmp_path, 1).read_text()
    assert json.loads(word)["host"]
    os._exit(0)
    assert success_path(tmp_path, 1).read_text() == word, "an earlier word stays"
    assert [call.args for call in ended.call_args_list] == [(3,), (0,), (0,)]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    success_path(tmp_path, 1).unlink()
    os._exit(0)
    assert not success_path(tmp_path, 1).exists(), "a process that the rank has forked is no rank"
