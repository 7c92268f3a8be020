"""How wide an interval must be so that it holds nine of ten published runs, by kind of plan.

A publication is off as a whole, and its runs scatter around that. Both are taken from how far the others were off when
each of them was left out of the fit, so that the width is tested on runs that neither the constants nor it have seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.calibration.spread import NINE_OF_TEN, SPREADS, Kind, kind_of
from scripts.fit.time_constants import ROWS_THAT_COUNT
from scripts.fit.time_scores import Scored

ROBUST = 1.4826
"""Standard deviation of a normal distribution over the median size of its draws."""

STUDENT_90 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
"""Student's t that nine of ten draws stay within, for 1, 2, ... degrees of freedom."""

FEWEST_PUBLICATIONS = 2
"""A kind of plan that fewer publications have takes the scatter of all kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """Standard deviations of log(measured / predicted): of publications, and of the runs of one, by kind of plan."""

    between: float
    within: Mapping[Kind, float]
    publications: int

    def total(self, kind: Kind) -> float:
        """What one run of another publication is off by; what nothing was compared with keeps its assumption."""
        if kind not in self.within:
            return SPREADS[kind].outside
        return math.hypot(self.between, self.within[kind])

    def half_width(self, kind: Kind) -> float:
        """What |log(measured / predicted)| should stay within for nine of ten runs.

        Runs are many and publications few: only the spread of the latter is uncertain itself.
        """
        if kind not in self.within:
            return NINE_OF_TEN * SPREADS[kind].outside
        student = STUDENT_90[min(max(self.publications - 2, 0), len(STUDENT_90) - 1)]
        return math.hypot(student * self.between, NINE_OF_TEN * self.within[kind])


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Runs, and the share of them whose measured time lies in the interval."""

    runs: int
    inside: float


def scatter(rows: Sequence[Scored]) -> Scatter:
    """Of runs that were left out of the fit."""
    compared = [row for row in rows if kind_of(row.run.job) != "unmeasured"]
    documents = sorted({row.run.document for row in compared})
    own = {name: [row for row in compared if row.run.document == name] for name in documents}
    bias = {name: statistics.median(row.log_error for row in own[name]) for name in documents}
    around = [
        (
            kind_of(row.run.job),
            name,
            abs(row.log_error - bias[name]),
            min(1.0, ROWS_THAT_COUNT / len(own[name])),
        )
        for name in documents
        for row in own[name]
    ]
    within: dict[Kind, float] = {}
    for kind in dict.fromkeys(kind for kind, *_ in around):
        enough = len({name for k, name, *_ in around if k == kind}) >= FEWEST_PUBLICATIONS
        weighted = [(size, weight) for k, _, size, weight in around if k == kind or not enough]
        within[kind] = _ninth_decile(weighted) / NINE_OF_TEN
    between = ROBUST * statistics.median(map(abs, bias.values()))
    return Scatter(between=between, within=within, publications=len(documents))


def _ninth_decile(weighted: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight) pairs: the value that nine tenths of the weight do not exceed."""
    ordered = sorted(weighted)
    wanted, passed = 0.9 * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted:
            return value
    return ordered[-1][0]


def covered(rows: Sequence[Scored]) -> list[tuple[Scored, bool]]:
    """Each left-out run, and whether it lies in the interval that the other publications give."""
    found = []
    for document in dict.fromkeys(row.run.document for row in rows):
        others = scatter([row for row in rows if row.run.document != document])
        found += [
            (row, abs(row.log_error) <= others.half_width(kind_of(row.run.job)))
            for row in rows
            if row.run.document == document
        ]
    return found


def coverage(found: Iterable[tuple[Scored, bool]]) -> Mapping[str, Coverage]:
    """Of all runs, and by kind of plan."""
    groups: dict[str, list[bool]] = {"all": []}
    for row, inside in found:
        groups["all"].append(inside)
        groups.setdefault(kind_of(row.run.job), []).append(inside)
    return {name: Coverage(runs=len(hits), inside=sum(hits) / len(hits)) for name, hits in groups.items()}
