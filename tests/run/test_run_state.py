"""What a run carries from attempt to attempt: the plan in use, those that failed, and the file that keeps it."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from planner.models.resolve import resolve_model
from planner.plan import Plan
from planner.plan_io import load_plan
from planner.request import WorkOptions, make_request
from planner.resolve_cluster import HardwareRequest, resolve_cluster
from planner.search import recommend
from strategies.launch import run_state
from strategies.launch.orders import Orders
from strategies.launch.run_state import PLAN_FILE, RunState
from strategies.launch.spec import LaunchSpec


@cache
def _plans() -> tuple[Plan, ...]:
    cluster = resolve_cluster(HardwareRequest(gpus=2, gpu="A100-SXM4-80GB"))
    options = WorkOptions(seq_len=512, global_batch=8, precision="bf16")
    return recommend(make_request(resolve_model("openai-community/gpt2"), cluster, options)).plans


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    return LaunchSpec(script="train.py", kind="dsplan", processes=2, run_directory=str(tmp_path))


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


def test_orders_that_cannot_be_written_are_told_in_one_line(spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(orders: Orders, directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Orders, "save", full)
    with pytest.raises(DsplanError, match=r"No space left on device\); make room, then go on with dsplan run --resume"):
        RunState(spec, None, resumes=False).begin_attempt(0)
