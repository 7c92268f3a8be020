"""Errors of predicted step times, and how well they choose between plans."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scripts.fit.published_rows import PublishedRun

SMALLEST_RANKED = 4
"""Runs of a group whose order is scored: with three, one swap is already half the scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A run with the step time that a model predicts."""

    run: PublishedRun
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.predicted_seconds / self.run.measured_seconds

    @property
    def log_error(self) -> float:
        """log(measured / predicted) of the seconds."""
        return -math.log(self.ratio)

    @property
    def error(self) -> float:
        """Of tokens per second and GPU: predicted / measured - 1."""
        return 1 / self.ratio - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Of tokens/s/GPU: how many, the median and 90th percentile of the sizes, and the median with its sign."""

    runs: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A group of plans: rank correlation of speeds where there are enough, and what the plan put first loses."""

    group: str
    source: str
    plans: int
    correlation: float | None
    loss: float


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors(rows: Sequence[Scored]) -> Errors:
    """Raises StatisticsError where there is no row."""
    sizes = [abs(row.error) for row in rows]
    return Errors(
        runs=len(rows),
        median=statistics.median(sizes),
        p90=percentile(sizes, 0.9),
        bias=statistics.median(row.error for row in rows),
    )


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


def choices(rows: Iterable[Scored]) -> list[Choice]:
    """Every group of at least two different plans; runs of the same plan count once, with the mean of their speeds."""
    groups: defaultdict[str, defaultdict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.run.alike][str(row.run.job.configuration)].append(row)
    return [_choice(name, list(plans.values())) for name, plans in groups.items() if len(plans) > 1]


def _choice(group: str, plans: Sequence[Sequence[Scored]]) -> Choice:
    predicted = [plan[0].run.rate(plan[0].predicted_seconds) for plan in plans]
    measured = [statistics.mean(row.run.tokens_per_s_per_gpu for row in plan) for plan in plans]
    first = max(range(len(plans)), key=lambda index: predicted[index])
    return Choice(
        group=group,
        source=plans[0][0].run.source,
        plans=len(plans),
        correlation=rank_correlation(predicted, measured) if len(plans) >= SMALLEST_RANKED else None,
        loss=1 - measured[first] / max(measured),
    )
