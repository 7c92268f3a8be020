"""`dsplan db calibrate` and what it changes, from the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dsplan.__main__ import main
from hardware_db.store import open_store
from hardware_db.store.transfer import export_text
from tests.planner.calibration.runs import User

QUESTION = "estimate --model facebook/opt-1.3b --gpus 8 --gpu A100-SXM4-80GB --seq-len 1024 --global-batch 64 --json"
CONFIGURATION = "--strategy fsdp --micro-batch 2 --checkpointing full --precision bf16"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data directory, empty."""
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _out(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(shlex.split(line)) in (0, 1)
    return capsys.readouterr().out


def _estimate(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    plan: dict[str, dict[str, float]] = json.loads(_out(capsys, f"{QUESTION} {CONFIGURATION}"))
    return plan


def test_with_nothing_stored_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert _out(capsys, "db calibrate").startswith("There is nothing to learn from: `dsplan run train.py`")
    assert json.loads(_out(capsys, "db calibrate --json")) == {"schema_version": 1, "calibrations": [], "skipped": 0}


def test_runs_change_the_next_estimate_and_its_provenance(capsys: pytest.CaptureFixture[str]) -> None:
    before = _estimate(capsys)
    with open_store() as store:
        store.add(*User().runs(10))
    told = json.loads(_out(capsys, "db calibrate --json"))["calibrations"]
    assert [
        (calibration["hardware"]["device"], calibration["rows"], calibration["stored"]) for calibration in told
    ] == [("A100-SXM4-80GB", 10, True)]
    assert told[0]["error_after"] < told[0]["error_before"] / 2
    assert told[0]["factors"]["compute"]["low"] < told[0]["factors"]["compute"]["value"] < 0.9
    after = _estimate(capsys)
    assert after["time"]["step_seconds"] > 1.15 * before["time"]["step_seconds"]
    assert (before["provenance"]["step"], after["provenance"]["step"]) == ("datasheet", "calibrated")
    widths = [plan["time"]["step_seconds_high"] / plan["time"]["step_seconds_low"] for plan in (before, after)]
    assert widths[1] < widths[0]


@pytest.mark.slow
def test_a_dry_run_says_the_same_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store() as store:
        store.add(*User().runs(10))
    before = _estimate(capsys)
    assert "would be stored" in _out(capsys, "db calibrate --dry-run")
    assert _estimate(capsys) == before
    shown = _out(capsys, "db calibrate")
    assert "A100-SXM4-80GB" in shown
    assert "in force" in shown
    assert "compute" in shown
    assert "in force already" in _out(capsys, "db calibrate")


def test_too_few_runs_are_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store() as store:
        store.add(*User().runs(2))
    shown = _out(capsys, "db calibrate")
    assert "refused" in shown
    assert "2 different configurations ran, and 3 are needed" in shown


def test_the_runs_of_others_teach_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with open_store(tmp_path / "theirs.db") as store:
        store.add(*User().runs(8))
        (tmp_path / "theirs.jsonl").write_text(export_text(store), encoding="utf-8")
    _out(capsys, f"db import {shlex.quote(str(tmp_path / 'theirs.jsonl'))}")
    assert json.loads(_out(capsys, "db calibrate --json"))["calibrations"][0]["stored"]
