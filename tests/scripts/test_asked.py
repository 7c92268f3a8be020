"""Published runs are asked through the command line's own path, all of them, and scored as the page says."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.fit.asked import Answer, Desk, PublishedQuestion, answers, kept, questions
from scripts.fit.published_rows import document_of
from scripts.fit.time_scores import percentile
from scripts.report.accuracy_asked import GRID, Rows, answered, gains, losses, moves
from tests.dsplan.cli import Cli

ASKED = questions()
BY_CASE = {run.case: run for run in ASKED}


def some(count: int) -> list[PublishedQuestion]:
    """Questions evenly spaced over all."""
    own = [run for run in ASKED if not run.why_not]
    return own[:: len(own) // count]


def test_every_row_of_the_collection_is_a_question_or_says_why_not() -> None:
    collection = [run for run in ASKED if run.source != GRID]
    assert len(collection) == 1540
    assert len(ASKED) - len(collection) == 761
    assert not [run.case for run in collection if bool(run.why_not) == bool(run.flags)]
    assert set(kept()) == {run.case for run in ASKED if not run.why_not}


def test_the_command_line_says_what_was_kept_of_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli, desk = Cli(capsys), Desk(tmp_path)
    for case in ("torchtitan_h100_2024-239", "vtrain_a100-700"):
        printed = cli("", *desk.command_line(BY_CASE[case])).json
        answer = desk.answer(BY_CASE[case])
        assert printed["throughput"]["tokens_per_second_per_gpu"] == pytest.approx(answer.tokens_per_s_per_gpu)
        assert printed["verdict"] == answer.verdict


def test_publications_are_left_out_whole() -> None:
    named = {run.publication for run in ASKED}
    assert named >= set(moves())
    assert not [run.case for run in ASKED if run.publication != document_of(run.source)]


def test_scores_by_hand() -> None:
    first = next(run for run in ASKED if run.memory_bytes and run.tokens_per_s_per_gpu and run.ran)
    half = Answer(tokens_per_s_per_gpu=first.tokens_per_s_per_gpu / 2, memory_bytes=first.memory_bytes, verdict="fits")
    out = replace(first, ran=False)
    vendor = replace(first, reading="vendor")
    rows = Rows(pairs=[(first, half), (out, half), (vendor, replace(half, verdict="does_not_fit"))])
    assert rows.speed == [-0.5, -0.5]
    assert rows.memory == [0.0, 0.0]
    assert rows.verdicts(ran=True) == {"fits": 1}
    assert rows.verdicts(ran=False) == {"fits": 1}


def test_regret_by_hand() -> None:
    slow, fast = (BY_CASE[f"{GRID}-{number}"] for number in (1, 1))
    slow = replace(slow, tokens_per_s_per_gpu=80.0)
    fast = replace(fast, tokens_per_s_per_gpu=100.0)
    pairs = [(slow, Answer(tokens_per_s_per_gpu=9.0)), (fast, Answer(tokens_per_s_per_gpu=8.0))]
    assert losses(pairs) == [pytest.approx(0.2)]


def test_kept_answers_are_todays() -> None:
    # Where this fails the answers have changed: run python -m scripts.fit.asked, then scripts.report.accuracy_report.
    sample, before = some(60), kept()
    today = answers(sample)
    for figure in ("tokens_per_s_per_gpu", "memory_bytes"):
        off = {case: getattr(before[case], figure) / (getattr(new, figure) or 1) - 1 for case, new in today.items()}
        assert not {case: change for case, change in off.items() if abs(change) > 0.02 and not today[case].refused}


def test_gains_by_hand() -> None:
    wide = next(run for run in ASKED if run.flags and run.flags["precision"] == "bf16")
    wide = replace(wide, tokens_per_s_per_gpu=100.0)
    narrow = replace(wide, source=f"{wide.source}_fp8", tokens_per_s_per_gpu=130.0)
    narrow = replace(narrow, flags={**wide.flags, "precision": "fp8", "fp8_recipe": "tensorwise"})
    elsewhere = replace(narrow, flags={**narrow.flags, "tp": 2})
    rates = [Answer(tokens_per_s_per_gpu=rate) for rate in (50.0, 60.0, 70.0)]
    assert list(gains(zip((wide, narrow, elsewhere), rates, strict=True))) == [(narrow, 1.3, 1.2, 2.0)]


def test_gains_of_fp8_are_predicted_for_publications_that_nothing_was_fitted_to() -> None:
    own = ("llmfoundry_h100_fp8", "dgxc_h100", "dgxc_gb200", "torchtitan_h100_2024")
    errors = [predicted / measured - 1 for run, measured, predicted, _ in gains(answered(kept())) if run.source in own]
    assert len(errors) > 25
    assert statistics.median(map(abs, errors)) < 0.05
    assert percentile([abs(error) for error in errors], 0.9) < 0.12
