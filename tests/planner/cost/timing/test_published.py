"""Published rows: how they are read, and how far the shipped time model is from them."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.fit.published_rows import PublishedRun, published_runs
from scripts.fit.time_scores import Scored, choices, errors, percentile, rank_correlation, ranks
from scripts.report.check_published import scored

RUNS = list(published_runs())


def rows_of(name: str) -> list[Scored]:
    return scored(run for run in RUNS if run.source.startswith(name) and run.reading == "stated")


@pytest.mark.parametrize(
    ("source", "largest_median"),
    [("llmfoundry", 0.10), ("torchtitan", 0.20), ("fms", 0.06), ("internevo", 0.08), ("vtrain", 0.08)],
)
def test_published_runs_are_predicted_as_documented(source: str, largest_median: float) -> None:
    # Guards against regressions, not proof of accuracy: constants are fitted to these rows.
    assert errors(rows_of(source)).median < largest_median


def test_plans_that_share_everything_else_are_put_in_order() -> None:
    correlations = [choice.correlation for choice in choices(rows_of("vtrain")) if choice.correlation is not None]
    assert len(correlations) == 62
    assert sum(correlations) / len(correlations) > 0.95


def test_every_row_that_is_not_stated_says_why() -> None:
    assert {run.reading for run in RUNS} == {"stated", "interpreted", "vendor", "disclaimed"}
    assert all(bool(run.why) == (run.reading != "stated") for run in RUNS)


def test_tables_of_one_publication_stay_together() -> None:
    documents = {run.source: run.document for run in RUNS}
    assert documents["llmfoundry_2023_a100_80"] == documents["llmfoundry_h100"] == documents["llmfoundry_a100_80"]
    assert documents["torchtitan_h100_2024"] == documents["torchtitan_h100_405b_2024"]
    assert documents["bigscience_tr3m_v100"] != documents["bigscience_176b_a100"]


def test_a_group_differs_only_in_its_plan() -> None:
    groups: dict[str, list[PublishedRun]] = {}
    for run in RUNS:
        groups.setdefault(run.alike, []).append(run)
    for group in groups.values():
        seen = Counter(
            (run.source, run.job.facts.num_layers, run.job.cluster.gpus, run.job.configuration.sequence_length)
            for run in group
        )
        batches = [run.job.configuration.global_batch_size for run in group]
        assert len(seen) == 1
        assert max(batches) <= 1.05 * min(batches)


def test_rank_correlation_by_hand() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert ranks([5, 1, 5]) == [2.5, 1, 2.5]
    assert rank_correlation([1, 1], [1, 2]) == 0


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert percentile(range(100), 0.9) == 90


def test_a_choice_loses_what_the_best_plan_would_have_gained() -> None:
    group = [run for run in RUNS if run.alike == max(Counter(run.alike for run in RUNS).items(), key=lambda x: x[1])[0]]
    right = [Scored(run=run, predicted_seconds=run.measured_seconds) for run in group]
    assert choices(right)[0].loss == pytest.approx(0, abs=1e-9)
    wrong = [Scored(run=run, predicted_seconds=1 / run.measured_seconds) for run in group]
    slowest = max(run.measured_seconds for run in group)
    assert choices(wrong)[0].loss == pytest.approx(1 - min(run.measured_seconds for run in group) / slowest, abs=0.02)
