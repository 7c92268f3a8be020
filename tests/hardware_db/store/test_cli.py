"""`dsplan db` from the command line, whole outputs."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsplan.__main__ import main
from hardware_db.files import canonical_json
from hardware_db.measurement import Measured
from hardware_db.store import open_store
from hardware_db.store.transfer import read_export, to_document
from tests.hardware_db.store.records import A100, FROZEN, measurement, plan, rate

EMPTY = "The database is empty: `dsplan run train.py` stores every run, `dsplan db import FILE` adds those of others.\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data directory, empty."""
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def filled(home: Path) -> None:
    """A database with two runs and a rate."""
    with open_store() as store:
        store.add(*FROZEN)


def _out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["db", *arguments]) == 0
    return capsys.readouterr().out


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["db", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert len(error.splitlines()) == 1
    return error


def test_an_empty_database_says_how_to_fill_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _out(capsys, "list") == EMPTY
    assert json.loads(_out(capsys, "list", "--json")) == {"schema_version": 1, "measurements": []}
    assert _out(capsys, "export") == ""


@pytest.mark.usefixtures("filled")
def test_list_is_aligned_text_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsplan.render.db_view.utc_now", lambda: "2026-06-01T00:00:00.000000Z")
    assert _out(capsys, "list") == (
        "id        UTC          model     strategy  outcome    peak, error  step, error\n"
        "--------  -----------  --------  --------  ---------  -----------  -----------\n"
        "00000000  01-31 00:00  opt-125m  ddp       OOM                  -            -\n"
        "00000000  01-31 00:00  opt-125m  ddp       completed  2.9 GiB -3%   260 ms -4%\n"
    )


@pytest.mark.usefixtures("filled")
def test_list_shows_the_date_alone_of_older_years(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsplan.render.db_view.utc_now", lambda: "2027-01-01T00:00:00.000000Z")
    assert "00000000  2026-01-31  opt-125m" in _out(capsys, "list")


def test_list_takes_filters_and_says_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store() as store:
        store.add(measurement(1), measurement(2), measurement(3, plan_json=canonical_json(plan(strategy="zero3"))))

    def ids(*arguments: str) -> list[str]:
        return [stored["id"][-1] for stored in json.loads(_out(capsys, "list", "--json", *arguments))["measurements"]]

    assert ids() == ["3", "2", "1"]
    assert ids("--limit", "1") == ["3"]
    assert ids("--strategy", "ddp", "--model", "OPT-125M") == ["2", "1"]
    assert ids("--model", "gpt2") == []
    assert _out(capsys, "list", "--limit", "2").endswith("There are older ones; --limit shows more.\n")
    assert "older" not in _out(capsys, "list", "--limit", "3")
    assert _out(capsys, "list", "--model", "gpt2") == (
        "None of the 3 stored runs matches; `dsplan db list` shows all.\n"
    )


@pytest.mark.usefixtures("filled")
def test_show_prints_plan_machine_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _out(capsys, "show", FROZEN[0].id)
    assert shown.startswith("opt-125m with ddp: completed\n")
    for line in (
        "UTC         2026-01-31 00:00:01",
        "peak allocated   2.9 GiB    2.8 GiB    -3%",
        "step              260 ms     250 ms    -4%",
        "micro batch size  4",
        "device         NVIDIA A100-SXM4-80GB",
        "device memory  80.0 GiB",
        f"key     {A100.versions.key}",
    ):
        assert line in shown.splitlines()
    assert "last loss" not in shown


@pytest.mark.usefixtures("filled")
def test_show_json_is_the_record_of_the_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(_out(capsys, "show", FROZEN[1].id, "--json")) == to_document(FROZEN[1])


@pytest.mark.usefixtures("filled")
def test_export_and_import_carry_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "runs.jsonl"
    assert _out(capsys, "export", str(file)) == f"3 records written to {file}\n"
    assert _out(capsys, "export") == file.read_text()
    assert read_export(file) == FROZEN
    assert _out(capsys, "import", str(file)) == "0 records imported, 3 were there already\n"
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "other"))
    assert _out(capsys, "import", str(file)) == "3 records imported, 0 were there already\n"
    assert _out(capsys, "show", FROZEN[0].id).count("import") == 1


@pytest.mark.usefixtures("filled")
def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "several measurements have ids that start with '00'" in _error(capsys, "show", "00")
    assert _error(capsys, "show", "00").rstrip().endswith("; give more digits")
    assert "no measurement has an id that starts with 'ff'" in _error(capsys, "show", "ff")
    assert "unknown strategy 'zero4'; nearest: zero3" in _error(capsys, "list", "--strategy", "zero4")
    assert "--limit" in _error(capsys, "list", "--limit", "0")
    assert "missing.jsonl: cannot be read" in _error(capsys, "import", str(tmp_path / "missing.jsonl"))
    assert "cannot be written" in _error(capsys, "export", str(tmp_path / "missing" / "out.jsonl"))
    assert "/dev/null: is not a regular file" in _error(capsys, "export", "/dev/null")


def test_a_broken_database_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    home.mkdir()
    (home / "dsplan.db").write_text("no database " * 100)
    for command in (["list"], ["list", "--json"], ["show", "a"], ["export"]):
        assert "dsplan.db: is not a SQLite database; move it away" in _error(capsys, *command)


@pytest.mark.usefixtures("filled")
def test_a_database_that_was_set_aside_is_named_until_it_is_deleted(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    with sqlite3.connect(home / "dsplan.db") as connection:  # an index that misses a row, which no page check sees
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("CREATE TABLE empty (created_at TEXT)")
        connection.execute("CREATE INDEX empty_by_time ON empty (created_at)")
        root = "(SELECT rootpage FROM sqlite_master WHERE name = 'empty_by_time')"
        connection.execute(f"UPDATE sqlite_master SET rootpage = {root} WHERE name = 'measurements_by_time'")
        connection.execute("DELETE FROM sqlite_master WHERE name LIKE 'empty%'")
    connection.close()
    assert main(["db", "list"]) == 0
    out, error = capsys.readouterr()
    (aside,) = home.glob("dsplan.db.damaged-*")
    assert out.count("opt-125m") == 2
    assert "was damaged: 2 measurements, 1 rates read and kept; the damaged file is" in error
    named = f"A damaged database was set aside as {aside}; delete it when you miss no run.\n"
    assert out.endswith(named)
    assert _out(capsys, "list").endswith(named)
    aside.unlink()
    assert "set aside" not in _out(capsys, "list")


def _is_garbage(path: Path) -> None:
    path.write_text("no database " * 100)


def _is_newer(path: Path) -> None:
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _has_trigger(path: Path) -> None:
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TRIGGER spy AFTER INSERT ON rates BEGIN DELETE FROM rates; END")
    connection.close()


@pytest.mark.parametrize(
    "make",
    [_is_garbage, _is_newer, _has_trigger, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)],
    ids=["garbage", "newer", "trigger", "directory", "pipe", "loop"],
)
def test_planning_continues_without_a_database_and_says_so(
    capsys: pytest.CaptureFixture[str], home: Path, make: Callable[[Path], None]
) -> None:
    question = ["--model", "gpt2", "--gpu", "H100-SXM5-80GB", "--gpus", "2", "--json"]
    assert main(["recommend", *question]) == 0
    without = json.loads(capsys.readouterr().out)
    home.mkdir()
    make(home / "dsplan.db")
    assert main(["recommend", *question]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out) == without
    (line,) = error.splitlines()
    assert line.startswith(f"dsplan: continuing without the database: {home / 'dsplan.db'}: ")
    assert line.removeprefix("dsplan: continuing without the database: ") in _error(capsys, "list")


def test_a_run_with_nothing_measured_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store() as store:
        store.add(measurement(1, outcome="failed", measured=Measured()), rate(1))
    assert "opt-125m with ddp: failed" in _out(capsys, "show", "0")


def test_the_command_neither_imports_torch_nor_rich_in_a_pipe(home: Path) -> None:
    code = "import sys; from dsplan.__main__ import main; main(['db', 'list']); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.startswith(EMPTY)
    loaded = {name.partition(".")[0] for name in ran.stdout.splitlines()[-1].split()}
    assert "sqlite3" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "rich"}


@pytest.mark.usefixtures("filled")
def test_forget_removes_one_run_and_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store() as store:
        gone, *stays = store.list()
    day = gone.created_at[:10]
    assert _out(capsys, "forget", gone.id) == (
        f"forgotten: {gone.id[:8]}, {gone.model} under {gone.strategy} on {day}\n"
    )
    with open_store() as store:
        assert list(store.list()) == stays
    assert "no measurement has an id" in _error(capsys, "forget", gone.id)
