"""Prints how far the time model is from published training runs, by source, and how well it orders plans.

    python scripts/check_published.py

The error is |predicted / measured - 1|. Groups that share everything but the plan (parallel degrees, micro-batch) are
ranked by Spearman's correlation of predicted and measured step time.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_rows import PublishedRun, published_runs

from planner.timing import step_time

SMALLEST_GROUP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A run with the step time that the model predicts."""

    run: PublishedRun
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.run.measured_seconds

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def scored(runs: Iterable[PublishedRun]) -> list[Scored]:
    return [Scored(run=run, predicted_seconds=step_time(run.job, run.code).step_seconds) for run in runs]


def ranks(values: Sequence[float]) -> list[float]:
    """1-based ranks, ties sharing their mean."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: Pearson's correlation of ranks; 0 where one side is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return 0.0
    return statistics.correlation(ranks(left), ranks(right))


def correlations(rows: Iterable[Scored]) -> list[float]:
    """Of every group that differs only in plan and holds at least four runs."""
    groups: defaultdict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.run.alike].append(row)
    return [
        rank_correlation([row.predicted_seconds for row in group], [row.run.measured_seconds for row in group])
        for group in groups.values()
        if len(group) >= SMALLEST_GROUP
    ]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(rows: Sequence[Scored]) -> Iterable[str]:
    """A line per source: runs, median and 90th percentile of the error, median ratio, rank correlation."""
    yield f"{'source':28} {'runs':>4} {'median':>7} {'p90':>6} {'ratio':>6}  rank correlation within groups"
    for source in dict.fromkeys(row.run.source for row in rows):
        of_source = [row for row in rows if row.run.source == source]
        errors = [row.error for row in of_source]
        ratio = statistics.median(row.ratio for row in of_source)
        found = correlations(of_source)
        order = f"{statistics.mean(found):.3f} over {len(found)}, lowest {min(found):.3f}" if found else "-"
        median, high = statistics.median(errors), percentile(errors, 0.9)
        yield f"{source:28} {len(errors):4} {median:7.1%} {high:6.1%} {ratio:6.2f}  {order}"


if __name__ == "__main__":
    print("\n".join(report(scored(published_runs()))))
