"""The lines and the last page that tell of endings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsplan.render.run_report import markdown, report_blocks, write_report
from dsplan.render.run_view import RunView, ending_line
from dsplan.render.show import Text
from dsplan.render.table_columns import Table
from hardware_db.units import format_ratio
from strategies.launch.attempt import AttemptEnded, OutputLine, RunIsBack, describe_preemption
from strategies.launch.failure_causes import Ending
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.launch.policy import Decision
from strategies.launch.report import (
    COMPLETED,
    INTERRUPTED,
    AttemptReport,
    Outcome,
    RunReport,
    earlier_attempts,
    outcome_of,
)
from strategies.run_directory.claim import LEFT_TO_SCRIPT
from strategies.run_directory.files import CLAIM_FILE, write_json
from strategies.run_directory.journal import Journal
from strategies.run_directory.spec import LaunchSpec
from strategies.supervision.lineage import RunCheckpoint, note
from strategies.telemetry.metrics import summarise

KILLED = Ending(kind="killed", rank=1, host="node1", step=8, reason="killed by signal 9")
AGAIN = Decision(action="restart", why="starts again", delay_seconds=2.0)
SAVED = Ending(kind="preempted", rank=0, step=12, reason="stopped at step 12 and saved", saved="/x/step-00000012")


def _report(directory: Path, outcome: Outcome, *endings: Ending | None) -> RunReport:
    spec = LaunchSpec(script="train.py", processes=2, run_directory=str(directory), supervision=DEFAULT_SUPERVISION)
    attempts = tuple(
        AttemptReport(
            attempt=number, began=1e9, seconds=5.0, ranks=2, first_step=1, last_step=8, ending=ending,
            decision=None if ending is None else AGAIN, seconds_lost=None if ending is None else 4.2,
        )
        for number, ending in enumerate(endings)
    )  # fmt: skip
    return RunReport(spec=spec, outcome=outcome, measured=summarise([]), plan=None, attempts=attempts)


def _line(ending: Ending, decision: Decision = AGAIN) -> str:
    return ending_line(AttemptEnded(attempt=0, ending=ending, decision=decision))


def test_an_ending_in_one_line_says_everything_once() -> None:
    assert _line(KILLED) == "dsplan: rank 1 (node1), step 8: killed by signal 9; starts again in 2 s"
    launcher = Ending(kind="killed", reason="the launcher was killed by signal 9")
    assert _line(launcher) == "dsplan: the launcher was killed by signal 9; starts again in 2 s"
    full = Ending(kind="out_of_memory", rank=0, reason="CUDA out of memory.")
    smaller = Decision(action="next_plan", why="the next plan follows")
    assert _line(full, smaller) == "dsplan: rank 0: CUDA out of memory.; the next plan follows"
    failed = Ending(kind="failed", rank=0, step=3, reason="ValueError: bad")
    assert _line(failed, smaller) == "dsplan: rank 0, step 3: failed: ValueError: bad; the next plan follows"


REFUSED = Ending(kind="refused", rank=0, reason="config: zero_optimizatio is not known")
GIVES_UP = Decision(action="give_up", why="no repetition mends this")


def test_a_refusal_is_left_to_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank's word, the end of the attempt and the page's table would say it three times more."""
    with RunView(ranks=2, out=sys.stdout) as view:
        view.show(OutputLine(rank=0, stream="stderr", text=f"error: {REFUSED.reason}"))
        view.show(AttemptEnded(attempt=0, ending=REFUSED, decision=GIVES_UP))
    shown, errors = capsys.readouterr()
    assert (shown, errors) == ("", "")
    report = _report(tmp_path, outcome_of(REFUSED), REFUSED)
    assert not [block for block in report_blocks(report, reason_follows=True) if isinstance(block, Table)]
    assert [block for block in report_blocks(report) if isinstance(block, Table)], "report.md keeps it"


def test_an_error_that_ends_nothing_is_shown_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with RunView(ranks=2, out=sys.stdout) as view:
        for text in ("error: of the script's own", "and then"):
            view.show(OutputLine(rank=0, stream="stderr", text=text))
        view.show(OutputLine(rank=1, stream="stderr", text="error: of another rank"))
        view.show(AttemptEnded(attempt=0, ending=REFUSED, decision=AGAIN))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["error: of the script's own", "and then", "[rank 1] error: of another rank"]
    assert REFUSED.reason in lines[3]


def test_the_page_lists_what_ran_and_what_happened(tmp_path: Path) -> None:
    ran, happened = (
        block for block in report_blocks(_report(tmp_path, COMPLETED, KILLED, None)) if isinstance(block, Table)
    )
    assert [row[0] for row in ran.rows] == ["0", "1"]
    (row,) = happened.rows
    assert list(row[1:]) == ["8", "rank 1 (node1)", "killed by signal 9", "starts again", "4.2 s"]


def test_long_words_on_an_ending_leave_the_table_its_width(tmp_path: Path) -> None:
    reason = "ValueError: " + "bad " * 100
    report = _report(tmp_path, COMPLETED, replace(KILLED, kind="failed", reason=reason), None)
    *_, happened = (block for block in report_blocks(report) if isinstance(block, Table))
    assert happened.rows[0][3] == f"failed: {reason}"[:159] + "…"


def test_steps_of_a_script_with_its_own_checkpoint_are_the_last_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _report(tmp_path, COMPLETED, KILLED, None)
    report = replace(report, measured=replace(report.measured, steps=30))
    assert report_blocks(report)[0] == Text(text="completed: 30 steps, 2 attempts", style="good")
    write_json(tmp_path / CLAIM_FILE, {"kind": "torch", "parameters": None})
    assert report_blocks(report)[0] == Text(text="completed: 30 steps in the last of 2 attempts", style="good")
    with RunView(ranks=2, out=sys.stdout) as view:
        view.show(RunIsBack(step=1, seconds_lost=None, counts_anew=True))
        view.show(RunIsBack(step=7, seconds_lost=2.0))
    assert capsys.readouterr().err.splitlines() == [
        "dsplan: trains again; dsplan keeps no checkpoint of this script, so steps are counted from the attempt's"
        " begin",
        "dsplan: back at step 7; 2 s lost",
    ]


def test_a_run_that_went_well_has_no_such_tables(tmp_path: Path) -> None:
    blocks = report_blocks(_report(tmp_path, COMPLETED, None))
    assert not [block for block in blocks if isinstance(block, Table)]


def test_a_stopped_run_says_how_to_resume(tmp_path: Path) -> None:
    write_report(_report(tmp_path, outcome_of(SAVED), SAVED), "stored")
    page = (tmp_path / "report.md").read_text()
    assert f"stopped at step 12 and saved; resume with dsplan run --resume {tmp_path}" in page
    unsaved = Ending(kind="preempted", reason="the ranks were ended without saving")
    write_report(_report(tmp_path, outcome_of(unsaved), unsaved), "stored")
    page = (tmp_path / "report.md").read_text()
    assert "stopped after 0 steps: the ranks were ended without saving; resume with" in page


@pytest.mark.parametrize(
    ("kind", "words"), [("dsplan", "the ranks were ended without saving"), ("torch", LEFT_TO_SCRIPT)]
)
def test_a_run_that_was_ended_says_what_it_resumes_from(tmp_path: Path, kind: str, words: str) -> None:
    (tmp_path / "claim.json").write_text(f'{{"kind": "{kind}"}}')
    killed = replace(KILLED, reason="killed by signal 15")
    assert describe_preemption(killed, tmp_path).reason == words
    failed = Ending(kind="failed", reason="ValueError: bad")
    assert describe_preemption(failed, tmp_path).reason == f"{words}; ValueError: bad"


def test_an_interrupted_run_says_how_to_resume_where_it_has_saved(tmp_path: Path) -> None:
    def page() -> str:
        write_report(_report(tmp_path, INTERRUPTED, None), "stored")
        return (tmp_path / "report.md").read_text()

    assert "interrupted after 0 steps; every rank was stopped" in page()
    (tmp_path / "claim.json").write_text('{"kind": "torch"}')
    assert f"after 0 steps; {LEFT_TO_SCRIPT}, with dsplan run --resume {tmp_path}" in page()
    (tmp_path / "step-4").mkdir()
    note(tmp_path, RunCheckpoint(path=str(tmp_path / "step-4"), step=4))
    assert f"interrupted after 0 steps; resume from step 4 with dsplan run --resume {tmp_path}" in page()


def test_markdown_keeps_a_cell_in_its_column() -> None:
    page = markdown([Table(columns=(), rows=[["a|b", "c\\d"]], title="t")], title="page")
    assert "| a\\|b | c\\\\d |" in page


def test_the_journal_tells_the_attempts_of_earlier_commands(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("attempt", 0, ranks=2, time=100.0)
    journal.append("ending", 0, time=105.0, first_step=1, last_step=8, **KILLED.to_dict())
    journal.append("decision", 0, time=105.0, action="restart", why="starts again", delay_seconds=0.0)
    journal.append("attempt", 1, ranks=2, time=106.0)
    journal.append("back", 1, time=108.0, step=7, seconds_lost=4.2)
    first, second = earlier_attempts(tmp_path)
    assert (first.seconds, first.first_step, first.last_step, first.ending) == (5.0, 1, 8, KILLED)
    assert (first.seconds_lost, second.seconds_lost) == (4.2, None)
    assert first.decision == Decision(action="restart", why="starts again")
    assert second.ending is not None
    assert second.ending.reason == "dsplan run itself was ended"
    (tmp_path / "metrics-rank0.jsonl").write_text(
        '{"event": "attempt", "attempt": 0}\n{"event": "step", "step": 0, "global_step": 1}\n'
        '{"event": "attempt", "attempt": 1}\n{"event": "step", "step": 0, "global_step": 7}\n'
        '{"event": "step", "step": 1, "global_step": 8}\n{"event": "machine", "time": 116.0}\n'
    )
    cut = earlier_attempts(tmp_path)[1]
    assert (cut.first_step, cut.last_step, cut.seconds, cut.ending and cut.ending.step) == (7, 8, 10.0, 8)
    journal.append("end", 1, time=120.0, outcome="completed", first_step=7, last_step=20)
    assert earlier_attempts(tmp_path)[1].ending is None
    assert earlier_attempts(tmp_path)[1].last_step == 20


@pytest.mark.parametrize(
    ("ratio", "text"), [(21.556, "21.56"), (1.0, "1.00"), (0.321, "0.32"), (0.099, "0.099"), (0.00337, "0.0034")]
)
def test_a_small_ratio_keeps_two_digits(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text
    plan: Any = SimpleNamespace(
        memory=SimpleNamespace(peak_allocated_bytes=1),
        time=SimpleNamespace(step_seconds=2.0),
        throughput=SimpleNamespace(samples_per_second=1.0),
        configuration=SimpleNamespace(counts_samples=True),
    )
    measured = replace(summarise([]), steps=9, step_seconds=2.0 * ratio)
    (table,) = (
        block
        for block in report_blocks(replace(_report(Path(), COMPLETED), plan=plan, measured=measured))
        if isinstance(block, Table)
    )
    assert table.rows[1][-1] == text
