"""How wide the interval of a step time and the bound of a memory must be by code base, so that nine of ten published
runs stay in them.

    python -m scripts.fit.code_intervals

A run's score is how far it is off, over the half width that its kind of plan has
(`planner.calibration.spread.SPREADS`), or over what it is said to need. A code base's factor is the ninth decile of the
scores of its publications, each of which counts once, beside all other publications, which count as `OTHERS` together:
one publication says little of the next.
For the coverage each publication is left out in turn, and its runs are held against the factor of the others.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hardware_db.datasheets import find_device
from planner.calibration.spread import MEASURED_ARCHITECTURES, NINE_OF_TEN, SPREADS, Kind
from scripts.fit import memory_bound
from scripts.fit.asked import Asked, kept
from scripts.report.accuracy_asked import GRID, answered

SHARE = 0.9
OTHERS = 2.0
"""Publications that all of other code bases count as."""
NARROWEST, WIDEST = 0.6, 4.0
"""Factors are kept within: a publication that agrees by chance proves nothing, one that is far off not everything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One run: whose code, where it was published, and how far it is off in half widths."""

    code: str
    publication: str
    value: float


def kind_of_asked(asked: Asked) -> Kind:
    """The kind of plan, as `planner.calibration.spread.kind_of` tells them apart."""
    if find_device(asked.cluster["gpu"]).architecture not in MEASURED_ARCHITECTURES:
        return "unmeasured"
    if asked.flags.get("offload", "none") != "none":
        return "offload"
    if asked.flags["tp"] * asked.flags["pp"] > 1:
        return "model parallel"
    return "node" if asked.cluster["nodes"] == 1 else "nodes"


def time_scores() -> list[Score]:
    """Of every published step of a stated plan; of plans that a vendor tuned where a code base has no others."""
    pairs = [
        (asked, answer)
        for asked, answer in answered(kept())
        if asked.tokens_per_s_per_gpu and asked.ran and not answer.refused and asked.source != GRID
    ]
    stated = {asked.code for asked, _ in pairs if asked.reading == "stated"}
    return [
        Score(
            code=asked.code,
            publication=asked.publication,
            value=abs(math.log(answer.tokens_per_s_per_gpu / asked.tokens_per_s_per_gpu))
            / (NINE_OF_TEN * SPREADS[kind_of_asked(asked)].outside),
        )
        for asked, answer in pairs
        if asked.reading == ("stated" if asked.code in stated else "vendor")
    ]


def memory_scores() -> list[Score]:
    """What every published run took over what it is said to need."""
    return [Score(code=run.code, publication=run.source, value=run.ratio) for run in memory_bound.measured()]


def factor(scores: Iterable[Score], code: str, share: float = SHARE) -> float:
    """The share's quantile of a code base's scores, shrunk to that of all."""
    publications: defaultdict[tuple[bool, str], list[float]] = defaultdict(list)
    for score in scores:
        publications[(score.code == code, score.publication)].append(score.value)
    others = sum(not own for own, _ in publications)
    weighted = sorted(
        (value, (1.0 if own else OTHERS / others) / len(values))
        for (own, _), values in publications.items()
        for value in values
    )
    wanted, passed = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= wanted:
            return value
    return weighted[-1][0]


def factors(scores: Sequence[Score], share: float = SHARE) -> dict[str, float]:
    """By code base, and of one that nothing was published of (empty)."""
    names = sorted({score.code for score in scores})
    return {name: min(max(factor(scores, name, share), NARROWEST), WIDEST) for name in ("", *names)}


def coverage(scores: Sequence[Score], share: float = SHARE) -> Mapping[str, tuple[int, float]]:
    """By code base: its runs, and the share that lies within the factor of all other publications, each counting
    once."""
    inside: defaultdict[str, list[float]] = defaultdict(list)
    runs: defaultdict[str, int] = defaultdict(int)
    for code, publication in sorted({(score.code, score.publication) for score in scores}):
        own = [score.value for score in scores if (score.code, score.publication) == (code, publication)]
        others = [score for score in scores if score.publication != publication]
        limit = min(max(factor(others, code, share), NARROWEST), WIDEST)
        inside[code].append(sum(value <= limit for value in own) / len(own))
        runs[code] += len(own)
    return {code: (runs[code], statistics.mean(shares)) for code, shares in inside.items()}


def report(title: str, scores: Sequence[Score], share: float) -> Iterator[str]:
    found, held = factors(scores, share), coverage(scores, share)
    yield f"{title:20} {'factor':>6} {'publications':>12} {'runs':>5}  left out, inside"
    for code, value in found.items():
        publications = len({score.publication for score in scores if score.code == code})
        runs, inside = held.get(code, (0, math.nan))
        yield f"{code or 'any other':20} {value:6.2f} {publications:12} {runs:5}  {inside:.0%}"


if __name__ == "__main__":
    print("\n".join(report("time", time_scores(), SHARE)))
    print("\n".join(report("memory", memory_scores(), memory_bound.SHARE)))
