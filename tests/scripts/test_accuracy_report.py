"""The accuracy report sums errors up as it says, lists every case, and asks other tools only what they claim."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

import pytest

from planner.vocabulary import Precision, Strategy
from scripts.fit.asked_rows import read
from scripts.peers.peers import NoAnswer, _accelerate, _question
from scripts.report.accuracy_cases import Case, all_cases
from scripts.report.accuracy_peers import PEERS, read_peers
from scripts.report.accuracy_report import TARGET, report
from scripts.report.accuracy_tables import spread

cases = cache(all_cases)
"""Made by the first test that asks, not by every process that collects tests: it takes seconds."""


def one(strategy: Strategy, precision: Precision) -> Case:
    """A published run of one strategy, in a precision."""
    first = next(case for case in cases() if case.strategy == strategy)
    return replace(first, job=replace(first.job, configuration=replace(first.job.configuration, precision=precision)))


def test_a_spread_is_of_sizes_and_keeps_the_signs_of_the_largest() -> None:
    errors = spread([0.02, -0.10, 0.05, 0.01, -0.03])
    assert (errors.cases, errors.median, errors.p90) == (5, 0.03, 0.10)
    assert (errors.over, errors.under, errors.worst) == (0.05, -0.10, 0.10)


def test_every_case_with_a_figure_is_listed() -> None:
    page = TARGET.read_text("utf-8")  # which is fresh, or test_docs.py fails
    assert not [case.name for case in cases() if case.measured and f"| {case.name} |" not in page]


def test_closed_forms_hold_for_every_shipped_trace() -> None:
    traced = [case for case in cases() if case.truth == "traced" and case.measured]
    assert len(traced) >= 150
    errors = sorted(case.error for case in traced)
    sizes = sorted(map(abs, errors))
    assert statistics.median(sizes) <= 0.015
    assert sizes[int(0.95 * len(sizes))] <= 0.04
    assert sizes[-1] <= 0.08
    assert errors[0] >= -0.03


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in cases()}) == len(cases())


def test_answers_of_other_tools_are_bytes_or_a_reason() -> None:
    answers = read_peers()
    assert {answer.peer for answer in answers} <= set(PEERS)
    assert all(bool(answer.bytes) != bool(answer.reason) for answer in answers)


def test_accelerate_counts_adam_training_of_one_device() -> None:
    case = one("single", "fp32")
    assert _accelerate(case.job) == 16 * case.job.counts.total
    assert _accelerate(one("single", "fp16").job) == 8 * case.job.counts.total
    with pytest.raises(NoAnswer, match="sharding"):
        _accelerate(one("zero2", "fp16").job)


def test_llm_analysis_is_asked_for_16_bits_only() -> None:
    assert _question(one("zero2", "fp16").job)["training"]["ds_zero"] == 2
    with pytest.raises(NoAnswer, match="16 bits"):
        _question(one("zero2", "fp32").job)


@pytest.mark.slow
def test_gpu_runs_get_a_section_of_their_own_and_their_verdicts() -> None:
    """As they will be once there are rows: one that ran, and one that ran out of memory."""
    on_cpu = next(case for case in cases() if case.truth == "cpu")
    ran = replace(on_cpu, truth="gpu", name="gpu-1", used_measured=2e9, used_predicted=3e9)
    out = replace(ran, name="gpu-2", ran=False, measured=0, used_measured=0, verdict="does_not_fit")
    page = "\n".join(report([ran, out]))
    assert "## Against GPUs" in page
    assert "### What the driver shows" in page
    assert "| 1 | 50.0% | 50.0% | +50.0% | +0.0% |" in page
    assert "| GPU, out of memory | 1 | 0 | 0 | 1 (100.0%) |" in page
    assert "## Against traces" not in page


@pytest.mark.parametrize("file", ["published_memory_left_out", "published_training_left_out"])
def test_what_is_left_out_of_a_table_is_not_called_impossible(file: str) -> None:
    """Plans have fp8, cp, ep, virtual stages and adapters: rows of those are asked as flags, some with an answer."""
    answered = {row["source"] for row in read("published_asked") if not row["why_not"]}
    rows = read(file)
    assert not [row for row in rows if "no plan does" in row["why"]]
    assert sum(row["why"].endswith("(asked)") for row in rows) > 20
    assert {row["source"] for row in rows if row["why"].endswith("(asked)")} <= answered
