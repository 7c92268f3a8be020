"""The accuracy report on step times: how it comes about, and that it does not get worse."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace

import pytest

from planner.calibration.fit import Fit
from planner.cost.timing import efficiency, step_time
from scripts.fit import time_accuracy
from scripts.fit.published_rows import MEASUREMENTS, PublishedRun, published_runs
from scripts.fit.time_accuracy import GRID, read_left_out
from scripts.fit.time_constants import Model, fitted, predicted
from scripts.fit.time_scores import choices, errors, percentile
from scripts.peers.peer_times import LLM_ANALYSIS, LLM_ANALYSIS_HALF, RULE, peer_scores, read_peer_times
from scripts.report.accuracy_time import times

RUNS = list(published_runs())
KEPT = read_left_out()
STATED = [row for row in KEPT if row.run.reading == "stated" and row.run.source != GRID]
SHAPES = [row for row in KEPT if row.run.source == GRID]


def of(document: str) -> list[PublishedRun]:
    return [run for run in RUNS if run.document == document]


def test_every_run_is_predicted() -> None:
    assert [row.run.name for row in KEPT] == [run.name for run in RUNS]


def test_kept_predictions_are_of_the_model_as_it_is() -> None:
    # Where this fails the time model has changed: run scripts/fit/time_accuracy.py, then build_accuracy_report.py.
    with time_accuracy.PATH.open(newline="") as lines:
        shipped = {row["run"]: float(row["shipped_seconds"]) for row in csv.DictReader(lines)}
    drift = {run.name: step_time(run.job).step_seconds / shipped[run.name] - 1 for run in RUNS}
    assert not {name: change for name, change in drift.items() if abs(change) > 0.02}


def test_left_out_publications_are_predicted_within_a_tenth() -> None:
    shares = errors(STATED)
    assert shares.median <= 0.10
    assert shares.p90 <= 0.25


def test_the_other_half_of_shapes_is_predicted() -> None:
    shares = errors(SHAPES)
    assert shares.median <= 0.08
    assert shares.p90 <= 0.20
    ranked = [choice.correlation for choice in choices(SHAPES) if choice.correlation is not None]
    assert statistics.median(ranked) >= 0.9


def test_plans_are_chosen_well() -> None:
    chosen = choices(STATED)
    assert statistics.median(choice.correlation for choice in chosen if choice.correlation is not None) >= 0.8
    losses = [choice.loss for choice in chosen]
    assert statistics.median(losses) <= 0.05
    assert percentile(losses, 0.9) <= 0.15


def test_other_tools_are_further_off() -> None:
    ours = errors(STATED)
    for name, rows in peer_scores([row.run for row in STATED]).items():
        assert errors(rows).median > ours.median, name
        assert errors(rows).p90 > ours.p90, name


def test_answers_of_other_tools_are_seconds_or_a_reason() -> None:
    answers = read_peer_times()
    assert {answer.peer for answer in answers} == {LLM_ANALYSIS, LLM_ANALYSIS_HALF}
    assert all(bool(answer.seconds) != bool(answer.reason) for answer in answers)
    assert {answer.run for answer in answers} == {run.name for run in RUNS}


def test_the_rule_of_thumb_by_hand() -> None:
    run = of("fms_fsdp")[0]
    score = peer_scores([run])[RULE][0]
    tokens = run.rate(score.predicted_seconds)
    facts = run.job.facts
    block = 2 * facts.hidden_size**2 * 2 + 3 * facts.hidden_size * facts.intermediate_size
    weights = facts.num_layers * block + facts.vocab_size * facts.hidden_size
    attention = 12 * facts.num_layers * facts.hidden_size * run.job.configuration.sequence_length
    assert tokens * (6 * weights + attention) == pytest.approx(0.40 * 312e12, rel=0.01)


def test_rows_read_and_left_out_are_all_there_are() -> None:
    with (MEASUREMENTS / "published_training_left_out.csv").open(newline="") as lines:
        left = sum(int(row["rows"]) for row in csv.DictReader(lines))
    assert left + sum(run.source != GRID for run in RUNS) == 1540


def test_a_publication_takes_no_part_in_its_own_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Model] = []

    def record(model: Model) -> Fit:
        seen.append(model)
        return Fit(names=(), values=(), covariance=(), spread=0.1)

    monkeypatch.setattr(time_accuracy, "fitted", record)
    scores = time_accuracy.left_out(RUNS)
    stated = list(dict.fromkeys(row.run.document for row in scores if row.run.reading == "stated"))
    absent = [set(stated) - {run.document for run in model.runs} for model in seen]
    assert [documents for documents in absent if documents] == [{document} for document in stated]
    assert len(absent) == len(stated) + 1
    assert {run.reading for model in seen for run in model.runs} == {"stated"}


def test_no_half_predicts_its_own_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def record(model: Model) -> Fit:
        seen.append({run.name for run in model.runs})
        return Fit(names=(), values=(), covariance=(), spread=0.1)

    monkeypatch.setattr(time_accuracy, "fitted", record)
    scores = time_accuracy.halves(RUNS)
    assert len(scores) == len(seen[0] | seen[1]) == 761
    assert not seen[0] & seen[1]
    assert not {row.run.name for row in scores[: len(scores) - len(seen[0])]} & seen[0]


def test_what_is_shipped_does_not_leak_into_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Fit(names=(), values=(), covariance=(), spread=0.1)
    runs = of("fms_fsdp") + of("torchtitan")
    before = predicted(runs, nothing)
    for table in (efficiency.GEMM_CEILING, efficiency.ATTENTION_CEILING):
        for name in list(table):
            monkeypatch.setitem(table, name, 0.7 * table[name])
    fresh = [replace(run, job=replace(run.job, cluster=replace(run.job.cluster))) for run in runs]
    assert predicted(fresh, nothing) == pytest.approx(before)


def test_a_fit_finds_what_made_the_runs() -> None:
    runs = of("fms_fsdp") + of("internevo")
    model = Model(runs)
    truth = [0.1 if constant.kind == "compute" else 0.0 for constant in model.constants]
    synthetic = [replace(run, measured_seconds=s) for run, s in zip(runs, model.seconds(truth), strict=True)]
    constants = fitted(Model(synthetic))
    values = dict(zip(constants.names, constants.values, strict=True))
    assert values["compute ampere SXM4"] == pytest.approx(0.1, abs=0.04)


def test_the_section_names_every_source_and_what_was_left_out() -> None:
    page = "\n".join(times())
    assert not [source for source in {run.source for run in RUNS} - {GRID} if f"| {source} |" not in page]
    assert "| easycontext_a100 | context parallel (asked) | 5 |" in page
