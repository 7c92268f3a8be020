"""Runs that report themselves to a database, and the pages that list them from there."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_db.store import open_store
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.reported_runs import REPORT_SECONDS, SILENT_SECONDS, RunReporter, from_report, runs_at
from strategies.launch.run_lock import RunLock
from strategies.run_directory.spec import LaunchSpec
from tests.dsplan.cli import Cli
from tests.dsplan.run_directories import append, completed_run, heartbeat, journal, restarted_run, steps
from tests.hardware_db.store.records import report

NOBODY = "postgresql://ada:secret@localhost:1/none"


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that everybody's commands name."""
    path = tmp_path / "team.db"
    monkeypatch.setenv("DSPLAN_DATABASE", str(path))
    return path


def spec_of(directory: Path, number: int = 1) -> LaunchSpec:
    return LaunchSpec(
        script="train.py",
        arguments=("--api-key", "hush"),
        processes=2,
        run_directory=str(directory),
        environment={"TOKEN": "hush"},
        supervision=DEFAULT_SUPERVISION,
        run_id=f"{number:032x}",
    )


def wait_for(database: Path, runs: int) -> None:
    deadline = time.monotonic() + 30
    while not database.exists() or len(runs_at(database).look()) < runs:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_database_lists_what_the_files_do(cli: Cli, tmp_path: Path, team: Path) -> None:
    folder = tmp_path / "hush"
    restarted_run(folder / "one", now=time.time())
    spec_of(folder / "one").save()
    reporter = RunReporter(spec_of(folder / "one"))
    with RunLock(folder / "one"):
        reporter.start()
        reporter.start()
        wait_for(team, 1)
        files = cli(f"watch --runs {shlex.quote(str(folder))} --json --price 3.6").json
        database = cli(f"watch --runs {shlex.quote(str(team))} --json --price 3.6").json
    reporter.close()
    list(reporter.finish(in_a_hurry=False))
    apart = {"directory", "user", "host", "heard_seconds_ago", "reason"}
    seconds = {"seconds", "goodput", "device_hours", "usd", "checkpoint_age_seconds", "quiet_seconds"}
    for name, value in files["runs"][0].items():
        if name not in apart:
            expected = pytest.approx(value, abs=2) if name in seconds else value
            assert database["runs"][0][name] == expected, name
    assert database["runs"][0]["user"]
    assert database["runs"][0]["directory"] is None
    assert b"hush" not in team.read_bytes()


def test_the_end_of_a_run_is_its_last_report(cli: Cli, tmp_path: Path, team: Path) -> None:
    run = tmp_path / "run"
    journal(run, {"event": "attempt", "attempt": 0, "time": time.time() - 9, "ranks": 2})
    reporter = RunReporter(spec_of(run))
    reporter.start()
    wait_for(team, 1)
    append(run / "metrics-rank0.jsonl", steps(1, 5))
    journal(run, {"event": "end", "time": time.time(), "outcome": "completed", "first_step": 1, "last_step": 5})
    assert list(reporter.finish(in_a_hurry=False)) == []
    page = cli(f"watch --runs {shlex.quote(str(team))} --once").out
    assert "1 run: 1 ended" in page
    assert "@" in page


def test_a_run_that_nobody_hears_of_is_silent(cli: Cli, team: Path) -> None:
    with open_store() as store:
        store.report(report(1))
        store.report(report(2, name="b", state="failed", outcome="out of memory", alerts_json='{"out_of_memory":1}'))
        store.report(report(3, name="c", state="ended", outcome="completed"))
    fresh, *over = runs_at(team).look()
    assert (fresh.name, fresh.state) == ("run-1", "running")
    assert [run.state for run in over] == ["ended", "failed"]
    old = from_report(replace(report(1), heard_seconds_ago=SILENT_SECONDS + 1))
    assert (old.state, old.is_alive, old.quiet_seconds) == ("silent", False, None)
    late = from_report(replace(report(1), heard_seconds_ago=REPORT_SECONDS))
    assert (late.state, late.checkpoint_age_seconds) == ("running", 5.0 + REPORT_SECONDS)
    assert from_report(replace(report(3, state="ended"), heard_seconds_ago=1e6)).state == "ended"
    page = cli(f"watch --runs {shlex.quote(str(team))}").out
    assert "3 runs: 1 running, 1 ended, 1 failed; 24 GPU-h, $98.41" in page  # 3 x 28804 s at $4.1 an hour
    assert "b: out of memory, see its log on node7" in page


def test_silent_runs_are_named_with_those_to_ask() -> None:
    from dsplan.render.runs_view import runs_blocks, runs_to_dict
    from dsplan.render.show import Text

    silent = from_report(replace(report(1), heard_seconds_ago=180.0))
    heading, _, line = runs_blocks([silent])
    assert isinstance(heading, Text)
    assert isinstance(line, Text)
    assert heading.text.startswith("1 run: 1 silent; ")
    assert line.text == "run-1: not heard of for 3 min, by ada@node7"
    assert runs_to_dict([silent])["states"]["silent"] == 1


def test_a_server_that_is_away_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("DSPLAN_DATABASE", NOBODY)
    journal(tmp_path / "run", {"event": "attempt", "attempt": 0, "time": time.time(), "ranks": 1})
    heartbeat(tmp_path / "run", 0, step=0)
    reporter = RunReporter(spec_of(tmp_path / "run"), every_seconds=0.02)
    reporter.start()
    lines: list[str] = []
    until = time.monotonic() + 0.5
    while time.monotonic() < until or not lines:
        lines += reporter.remarks()
        time.sleep(0.01)
    lines += reporter.finish(in_a_hurry=True)
    assert len(lines) == 1
    assert lines[0].startswith(
        "this run is missing on the team's page, and is tried again: postgresql://ada@localhost:1"
    )
    assert "secret" not in lines[0]
    assert "\n" not in lines[0]


def test_nothing_is_reported_where_nobody_named_a_database(tmp_path: Path, dsplan_home: Path) -> None:
    completed_run(tmp_path / "run", at=0.0, seconds=9.0, count=3)
    reporter = RunReporter(spec_of(tmp_path / "run"))
    reporter.start()
    assert list(reporter.finish(in_a_hurry=False)) == []
    assert not dsplan_home.exists()


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("mysql://host/name", "--runs: mysql:// is no database that dsplan knows"),
        (NOBODY, "start the server, or correct --runs"),
    ],
)
def test_what_tells_of_no_runs_is_refused(cli: Cli, where: str, complaint: str) -> None:
    if "postgresql" in where:
        pytest.importorskip("psycopg")
    line = cli.refuses(f"watch --runs {where}")
    assert complaint in line
    assert "secret" not in line


def test_the_served_page_lists_a_database(team: Path) -> None:
    from dsplan.ui.runs import RunsPage

    with open_store() as store:
        store.report(report(1, name="<b>ann", host="<i>node"))
    page = RunsPage(team)
    assert "&lt;b&gt;ann" in page.html()
    assert "ada@&lt;i&gt;node" in page.html()
