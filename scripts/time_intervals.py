"""How wide an interval must be so that it holds nine of ten published runs, by class of plan.

The width for a publication is taken from how far the others were off when each of them was left out of the fit, so that
it is tested on runs that neither the constants nor the width have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from published_rows import PublishedRun
from time_constants import ROWS_THAT_COUNT
from time_scores import Scored

PlanClass = Literal["one node", "several nodes", "tp or pp", "offload"]
CLASSES: tuple[PlanClass, ...] = get_args(PlanClass)

SHARE = 0.90
NORMAL_90 = 1.645
"""A normal error stays within this many standard deviations nine times out of ten."""

FEWEST_PUBLICATIONS = 2
"""A class that fewer other publications have takes the spread of all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Runs, and the share of them whose measured time lies in the interval."""

    runs: int
    inside: float


def class_of(run: PublishedRun) -> PlanClass:
    """The class whose spread a plan has."""
    plan, cluster = run.job.configuration, run.job.cluster
    if plan.offload != "none":
        return "offload"
    if plan.tp > 1 or plan.pp > 1:
        return "tp or pp"
    return "several nodes" if cluster.nodes > 1 else "one node"


def half_width(rows: Sequence[Scored]) -> float:
    """What |log(measured / predicted)| stays within for nine runs of ten, a publication counting as in the fit."""
    counts = Counter(row.run.document for row in rows)
    weighted = sorted((abs(row.log_error), min(1.0, ROWS_THAT_COUNT / counts[row.run.document])) for row in rows)
    wanted, passed = SHARE * sum(weight for _, weight in weighted), 0.0
    for size, weight in weighted:
        passed += weight
        if passed >= wanted:
            return size
    return weighted[-1][0]


def spreads(rows: Sequence[Scored]) -> dict[PlanClass, float]:
    """Standard deviation of log(measured / predicted) by class: the half width, as if errors were normal."""
    return {kind: half_width(_of_class(rows, kind)) / NORMAL_90 for kind in CLASSES}


def _of_class(rows: Sequence[Scored], kind: PlanClass) -> Sequence[Scored]:
    own = [row for row in rows if class_of(row.run) == kind]
    return own if len({row.run.document for row in own}) >= FEWEST_PUBLICATIONS else rows


def covered(rows: Sequence[Scored]) -> list[tuple[Scored, bool]]:
    """Each left-out run, and whether it lies in the interval that the other publications give."""
    found = []
    for document in dict.fromkeys(row.run.document for row in rows):
        widths = spreads([row for row in rows if row.run.document != document])
        found += [
            (row, abs(row.log_error) <= NORMAL_90 * widths[class_of(row.run)])
            for row in rows
            if row.run.document == document
        ]
    return found


def coverage(found: Iterable[tuple[Scored, bool]]) -> Mapping[str, Coverage]:
    """By class of plan, and of all."""
    groups: dict[str, list[bool]] = {"all": []}
    for row, inside in found:
        groups["all"].append(inside)
        groups.setdefault(class_of(row.run), []).append(inside)
    return {name: Coverage(runs=len(hits), inside=sum(hits) / len(hits)) for name, hits in groups.items()}
