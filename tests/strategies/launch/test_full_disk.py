"""A disk that takes no more, in the small files of the command itself."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsplan.cli.run import _keep_page
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.report import COMPLETED, RunReport
from strategies.run_directory.files import keep_result, write_json
from strategies.run_directory.journal import Journal, read_journal
from strategies.run_directory.spec import LaunchSpec
from strategies.telemetry.metrics import summarise


@contextmanager
def _no_space() -> Iterator[None]:
    """No file of this process may grow; the system says so as it does for a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_json_that_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, 1)
    with _no_space(), pytest.raises(OSError, match="File too large"):
        write_json(path, 2)
    assert path.read_text() == "1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_journal_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path)
    journal.append("attempt", 0)
    with _no_space():
        journal.append("ending", 0)
        journal.append("decision", 0)
    journal.append("end", 0)
    assert [row["event"] for row in read_journal(tmp_path)] == ["attempt", "end"]
    printed = capsys.readouterr().err
    assert printed.startswith("dsplan: run.jsonl: ")
    assert printed.count("\n") == 1


def test_a_page_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = LaunchSpec(script="train.py", processes=1, run_directory=str(tmp_path), supervision=DEFAULT_SUPERVISION)
    report = RunReport(spec=spec, outcome=COMPLETED, measured=summarise([]), plan=None)
    with _no_space():
        _keep_page(report, "stored")
    assert capsys.readouterr().err.startswith("dsplan: report.md: ")
    assert list(tmp_path.iterdir()) == []
    _keep_page(report, "stored")
    assert "stored" in (tmp_path / "report.md").read_text()


def test_a_line_of_the_journal_that_was_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("attempt", 0)
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write('{"event": "ending", "att')
    journal.append("decision", 0)
    journal.append("end", 0)
    assert [row["event"] for row in read_journal(tmp_path)] == ["attempt", "decision", "end"]


def test_how_ranks_ended_may_stay_unwritten(tmp_path: Path) -> None:
    with _no_space():
        keep_result(tmp_path, {"failures": {}})
    assert list(tmp_path.iterdir()) == []
