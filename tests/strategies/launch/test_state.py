"""State of a run from attempt to attempt: the plan in use, those that failed, and the file that keeps it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.models.resolve import resolve_model
from planner.search.request import WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Plan
from planner.types.plan_io import load_plan
from strategies.launch import state as run_state
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.state import RunState
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import PLAN_FILE
from strategies.run_directory.journal import Journal
from strategies.run_directory.spec import LaunchSpec
from strategies.supervision import lineage


@cache
def _plans() -> tuple[Plan, ...]:
    cluster = resolve_cluster(HardwareRequest(gpus=2, gpu="A100-SXM4-80GB"))
    options = WorkOptions(seq_len=512, global_batch=8, precision="bf16")
    return recommend(make_request(resolve_model("openai-community/gpt2"), cluster, options)).plans


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    return LaunchSpec(script="train.py", processes=2, run_directory=str(tmp_path), supervision=DEFAULT_SUPERVISION)


def test_only_a_plan_that_ran_is_ruled_out(spec: LaunchSpec) -> None:
    first, second = _plans()[:2]
    state = RunState(spec, first, resumes=False)
    assert not state.has_rejected_plan
    state.reject_plan()
    assert state.has_rejected_plan  # until the ranks of the next attempt have found another
    state.adopt(second)
    assert not state.has_rejected_plan


def test_a_command_that_has_not_begun_leaves_the_plan_of_the_one_that_runs(spec: LaunchSpec) -> None:
    first, second = _plans()[:2]
    RunState(spec, first, resumes=False).begin_attempt(0)
    late = RunState(spec, second, resumes=True)
    assert load_plan(spec.directory / PLAN_FILE) == first
    late.begin_attempt(1)
    assert load_plan(spec.directory / PLAN_FILE) == second


def test_checkpoints_of_an_earlier_command_are_no_progress(spec: LaunchSpec) -> None:
    saved = spec.directory / "step-00000005"
    saved.mkdir()
    (spec.directory / "checkpoints.jsonl").write_text(f'{{"step": 5, "path": "{saved}"}}\n')
    state = RunState(spec, None, resumes=True)
    state.course.begin(0.0)
    state.notice_saves()
    assert not state.course.progressed


def test_a_full_disk_ends_no_run_for_its_plan_file(spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(plan: Plan, path: Path) -> None:
        raise run_state.BrokenFile(path, "cannot be written (No space left on device)", "make room")

    monkeypatch.setattr(run_state, "save_plan", full)
    state = RunState(spec, None, resumes=False)
    state.adopt(_plans()[0])
    assert state.plan == _plans()[0]


def test_orders_that_cannot_be_written_are_reported_in_one_line(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(attempt_options: AttemptOptions, directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(AttemptOptions, "save", full)
    with pytest.raises(
        DsplanError, match=r"No space left on device\); make room, then resume with dsplan run --resume"
    ):
        RunState(spec, None, resumes=False).begin_attempt(0)


def _train(spec: LaunchSpec, *, steps: int = 6, saved: tuple[int, ...] = (2, 4)) -> RunState:
    """The run directory of an attempt that came to a step and saved on the way; the journal is the supervisor's."""
    state = RunState(spec, None, resumes=False)
    state.begin_attempt(0)
    journal = Journal(spec.directory)
    journal.append("attempt", 0, saved=0)
    for step in saved:
        path = spec.directory / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        lineage.note(spec.directory, lineage.RunCheckpoint(path=str(path), step=step, run=spec.run_id))
    for checkpoint in state.notice_saves():
        journal.append("saved", checkpoint.attempt, step=checkpoint.step, path=checkpoint.path)
    rows = [{"event": "attempt", "attempt": 0}, *({"event": "step", "global_step": at + 1} for at in range(steps))]
    (spec.directory / "metrics-rank0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return state


def _resumed(spec: LaunchSpec, resume_from: str = "") -> AttemptOptions:
    state = RunState(spec, None, resumes=True, resume_from=resume_from)
    state.begin_attempt(state.first)
    return state.options


def _without(*names: str) -> Callable[[Path], None]:
    def remove(directory: Path) -> None:
        for name in names:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


@pytest.mark.parametrize(
    ("saved", "lose", "may_begin_anew"),
    [
        ((2, 4), _without(), False),
        ((2, 4), _without("checkpoints.jsonl"), False),
        ((2, 4), _without("checkpoints", "checkpoints.jsonl"), False),
        ((2, 4), _without("run.jsonl"), False),
        ((2, 4), _without("run.jsonl", "orders.json", "checkpoints.jsonl", "checkpoints"), False),
        ((), _without("run.jsonl"), False),
        ((), _without(), True),
    ],
)
def test_a_resumed_run_begins_anew_only_where_its_journal_knows_that_nothing_was_ever_saved(
    saved: tuple[int, ...], lose: Callable[[Path], None], may_begin_anew: bool, spec: LaunchSpec
) -> None:
    _train(spec, saved=saved)
    lose(spec.directory)
    attempt_options = _resumed(spec)
    assert (attempt_options.attempt, attempt_options.resumes, attempt_options.reached) == (1, True, 6)
    assert attempt_options.may_begin_anew is may_begin_anew


def test_an_attempt_after_one_that_saved_does_not_begin_anew(spec: LaunchSpec) -> None:
    state = _train(spec)
    state.course.reached(6, 0.0)
    _without("checkpoints", "checkpoints.jsonl")(spec.directory)
    state.begin_attempt(1)
    assert (state.options.reached, state.options.may_begin_anew) == (6, False)
    fresh = RunState(spec, None, resumes=False)
    fresh.begin_attempt(0)
    fresh.course.reached(3, 0.0)
    fresh.begin_attempt(1)  # killed before its first checkpoint
    assert (fresh.options.reached, fresh.options.may_begin_anew) == (3, True)


def test_a_journal_written_before_it_told_of_checkpoints_vouches_for_nothing(spec: LaunchSpec) -> None:
    _train(spec, saved=())
    (spec.directory / "run.jsonl").write_text('{"event": "attempt", "attempt": 0, "time": 1.0}\n')
    assert not _resumed(spec).may_begin_anew


def test_what_resume_from_names_is_kept_for_the_attempts_that_follow(spec: LaunchSpec) -> None:
    _train(spec)
    for resume_from in ("start", ""):  # the second resumes with what was begun anew
        attempt_options = _resumed(spec, resume_from)
        assert (
            attempt_options.since,
            attempt_options.base,
            attempt_options.reached,
            attempt_options.may_begin_anew,
        ) == (1, "", 0, True)
    Journal(spec.directory).append("attempt", 2, saved=0, since=1, base="")
    (spec.directory / "orders.json").unlink()
    assert _resumed(spec).since == 1
    named = _resumed(spec, "/some/step-00000002")
    assert (named.base, named.since, named.may_begin_anew) == ("/some/step-00000002", named.attempt, False)


def test_checkpoints_are_noticed_once_and_when_they_are_complete(spec: LaunchSpec) -> None:
    state = _train(spec)
    assert state.saved == 4
    path = spec.directory / "checkpoints" / "step-00000006"
    lineage.note(spec.directory, lineage.RunCheckpoint(path=str(path), step=6))
    assert state.notice_saves() == []
    path.mkdir()
    assert [checkpoint.step for checkpoint in state.notice_saves()] == [6]
    assert state.notice_saves() == []
    assert RunState(spec, None, resumes=True).saves_to_note[0].step == 6  # the journal has not been told of it
