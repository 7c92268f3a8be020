"""Measures how far ratios of two predicted step times are from those measured, by how the two plans differ.

Pairs are published runs that differ only in their plan, as they were predicted when their publication was left out of
the fit (`time_left_out.csv`). Every group of runs counts once, whatever its number of pairs. The last lines say what
the plan that goes first loses against the best that was measured, where a group holds simple and less simple plans.

python -m scripts.fit.ratio_spread
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.search.ranking import simplicity, slower_threshold
from planner.types.plan import Configuration
from scripts.fit.time_accuracy import GRID, read_left_out
from scripts.fit.time_scores import Scored, percentile

SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two runs of a group: how they differ, and |log| of the predicted over the measured ratio."""

    kind: str
    group: str
    error: float


def pairs(rows: Iterable[Scored]) -> Iterator[Pair]:
    """Every pair of runs that differ only in their plan."""
    groups: defaultdict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.run.alike].append(row)
    for name, group in groups.items():
        for first, second in combinations(group, 2):
            kind = kind_of(first.run.job.configuration, second.run.job.configuration)
            if kind:
                yield Pair(kind=kind, group=name, error=abs(first.log_error - second.log_error))


def kind_of(one: Configuration, other: Configuration) -> str:
    """The largest difference between two plans; empty where there is none, and the two are repeats."""
    split = [plan.tp * plan.pp > 1 for plan in (one, other)]
    if split[0] != split[1]:
        return "whole and split layers"
    if one.strategy != other.strategy:
        return "two strategies"
    if (one.tp, one.pp) != (other.tp, other.pp):
        return "two splits of layers"
    return "one strategy" if one != other else ""


def quantile(listed: Iterable[Pair], share: float) -> float:
    """Of the errors, where every group weighs the same."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for pair in listed:
        groups[pair.group].append(pair.error)
    weighted = sorted((error, 1 / len(errors)) for errors in groups.values() for error in errors)
    wanted, sum_of = share * len(groups), 0.0
    for error, weight in weighted:
        sum_of += weight
        if sum_of >= wanted:
            return error
    return weighted[-1][0]


def losses(rows: Iterable[Scored], *, simplest: bool) -> list[float]:
    """By group: how much longer than the best measured step the chosen plan's took."""
    groups: defaultdict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.run.alike].append(row)
    mixed = [group for group in groups.values() if len({simplicity(_plan(row)) for row in group}) > 1]
    best = (min(row.run.measured_seconds for row in group) for group in mixed)
    return [_chosen(group, simplest).run.measured_seconds / least - 1 for group, least in zip(mixed, best, strict=True)]


def _chosen(group: Sequence[Scored], simplest: bool) -> Scored:
    """The first plan, as `planner.search.ranking` chooses it."""
    by_time = sorted(group, key=lambda row: row.predicted_seconds)
    fastest = by_time[0]
    if not simplest:
        return fastest
    alike = [
        row
        for row in by_time
        if row.predicted_seconds / fastest.predicted_seconds <= 1 + slower_threshold(_plan(row), _plan(fastest))
    ]
    level = min(simplicity(_plan(row)) for row in alike)
    return next(row for row in by_time if simplicity(_plan(row)) <= level)


def _plan(row: Scored) -> Configuration:
    return row.run.job.configuration


def report(rows: Iterable[Scored]) -> Iterator[str]:
    every, kinds = list(rows), defaultdict[str, list[Pair]](list)
    for pair in pairs(every):
        kinds[pair.kind].append(pair)
    yield f"{'pairs of':24} {'pairs':>6} {'groups':>6} {'median':>7} {'p90':>6}"
    for kind, of_kind in kinds.items():
        groups = len({pair.group for pair in of_kind})
        yield f"{kind:24} {len(of_kind):6} {groups:6} {quantile(of_kind, 0.5):7.3f} {quantile(of_kind, SHARE):6.3f}"
    stated = [abs(row.error) for row in every if row.run.reading == "stated" and row.run.source != GRID]
    median, high = percentile(stated, 0.5), percentile(stated, SHARE)
    yield f"{'single predictions':24} {len(stated):6} {'':6} {median:7.3f} {high:6.3f}"
    for name, simplest in (("loss, simplest first", True), ("loss, fastest first", False)):
        lost = losses(every, simplest=simplest)
        yield f"{name:24} {'':6} {len(lost):6} {percentile(lost, 0.5):7.3f} {percentile(lost, SHARE):6.3f}"


if __name__ == "__main__":
    print("\n".join(report(read_left_out())))
