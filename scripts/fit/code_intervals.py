"""How wide the interval of a step time and the bound of a memory must be by code base, so that nine of ten published
runs stay in them.

    python -m scripts.fit.code_intervals

A run's score is how far it is off over the half width of its kind of plan (`planner.calibration.spread.SPREADS`), or
what it took over what it is said to need. The factor of a code base that enough was published of is a quantile of the
scores of its publications, each of which weighs like ten runs, or like those that it has; others have that of all (1,
or `BEYOND_NEED`). For the coverage each publication is left out in turn, and its runs are held against the factor of
the others, or that of all where it is larger and too little is left. Where enough is always left and fewer than wanted
stay inside, factors are widened until they do.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hardware_db.datasheets import find_device
from planner.calibration.spread import MEASURED_ARCHITECTURES, NINE_OF_TEN, SPREADS, Kind
from planner.cost.code_bases import of_any_year
from planner.cost.memory.overhead import BEYOND_NEED
from scripts.fit import memory_bound
from scripts.fit.asked import Asked, kept
from scripts.fit.time_constants import ROWS_THAT_COUNT
from scripts.report.accuracy_asked import GRID, answered

SHARE = 0.9
ELSEWHERE = " elsewhere"
"""Marks runs on devices that the usual widths were not compared with."""
FEWEST_PUBLICATIONS, FEWEST_RUNS = 2, 20
"""What is enough."""


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
    if any(asked.flags.get(degree, 1) > 1 for degree in ("tp", "pp", "cp", "ep")):
        return "model parallel"
    return "node" if asked.cluster["nodes"] == 1 else "nodes"


def time_scores() -> list[Score]:
    """Of every published step of a stated plan; of plans that a vendor tuned where a code base has no others."""
    pairs = [
        (asked, answer)
        for asked, answer in answered(kept())
        if asked.tokens_per_s_per_gpu and asked.ran and not answer.refused and asked.source != GRID
        if asked.flags.get("method", "full") == "full"
    ]
    stated = {asked.code for asked, _ in pairs if asked.reading == "stated"}
    return [
        Score(
            code=f"{of_any_year(asked.code)}{ELSEWHERE if kind_of_asked(asked) == 'unmeasured' else ''}",
            publication=asked.publication,
            value=abs(math.log(answer.tokens_per_s_per_gpu / asked.tokens_per_s_per_gpu))
            / (NINE_OF_TEN * SPREADS[kind_of_asked(asked)].outside),
        )
        for asked, answer in pairs
        if asked.reading == ("stated" if asked.code in stated else "vendor")
    ]


def memory_scores() -> list[Score]:
    """What every published run took over what it is said to need."""
    return [
        Score(code=of_any_year(run.code), publication=run.source, value=run.ratio) for run in memory_bound.measured()
    ]


def factor(scores: Iterable[Score], share: float) -> float:
    """The share's quantile of scores, where no publication weighs more than another of ten runs or more."""
    publications: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        publications[score.publication].append(score.value)
    weighted = sorted(
        (value, min(1.0, ROWS_THAT_COUNT / len(values))) for values in publications.values() for value in values
    )
    wanted, passed = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        passed += weight
        if passed >= wanted:
            return value
    return weighted[-1][0]


def factors(scores: Sequence[Score], share: float) -> dict[str, float]:
    """By code base that enough was published of."""
    found = {}
    for code in sorted({score.code for score in scores}):
        own = [score for score in scores if score.code == code]
        if len({score.publication for score in own}) >= FEWEST_PUBLICATIONS and len(own) >= FEWEST_RUNS:
            found[code] = widening(own, share) * factor(own, share)
    return found


def widening(own: Sequence[Score], share: float) -> float:
    """What factors of a code base are widened by, so that its publications hold the share of the one left out."""
    left = {name: [score for score in own if score.publication != name] for name in {each.publication for each in own}}
    if any(len(others) < FEWEST_RUNS for others in left.values()):
        return 1.0
    limits = {name: factor(others, share) for name, others in left.items()}
    over = sorted(score.value / limits[score.publication] for score in own)
    return max(1.0, over[math.ceil(share * len(over)) - 1])


def coverage(scores: Sequence[Score], share: float, usual: float) -> Mapping[str, tuple[int, float]]:
    """By code base: its runs, and the share of them within the factor of its other publications, or within the usual
    one where it has no factor of its own."""
    known = factors(scores, share)
    inside: defaultdict[str, list[bool]] = defaultdict(list)
    for code, publication in sorted({(score.code, score.publication) for score in scores}):
        own = [score for score in scores if score.code == code]
        others = [score for score in own if score.publication != publication]
        limit = widening(own, share) * factor(others, share) if code in known else usual
        if len(others) < FEWEST_RUNS:
            limit = max(limit, usual)
        inside[code] += [score.value <= limit for score in own if score.publication == publication]
    return {code: (len(hits), statistics.mean(hits)) for code, hits in inside.items()}


def report(title: str, scores: Sequence[Score], share: float, usual: float) -> Iterator[str]:
    known = factors(scores, share)
    yield f"{title:28} {'factor':>6} {'publications':>12} {'runs':>5}  left out, inside"
    for code, (runs, inside) in coverage(scores, share, usual).items():
        publications = len({score.publication for score in scores if score.code == code})
        value = f"{known[code]:.2f}" if code in known else "-"
        yield f"{code:28} {value:>6} {publications:12} {runs:5}  {inside:.0%}"


if __name__ == "__main__":
    print("\n".join(report("time", time_scores(), SHARE, 1.0)))
    print("\n".join(report("memory", memory_scores(), memory_bound.SHARE, 1 + BEYOND_NEED)))
