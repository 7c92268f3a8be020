"""Widths of the intervals of step times and of the bounds of memory, so that nine of ten runs stay in them that nobody
looked at.

    python -m scripts.fit.intervals [--anew]

writes `planner/cost/intervals.json` and `interval_coverage.csv` from the rows of `interval_rows.csv`, which `--anew`
works out first (minutes).

A run's score is how far it is off, in logarithms. The width of a regime is the ninth decile of the scores of its
publications; that of a code base the ninth decile of what its publications are off over the widths of their regimes,
mixed with one publication more: runs of other code bases, predicted as still others, which is as far as code bases
differ. A code base without publications has that alone. No publication counts more than another of ten runs.

Such widths hold what they were worked out from. So each publication, code base and architecture is left out in turn,
and the upper third of sizes is predicted from the lower one and the other way round: the widths of the rest are
multiplied by what nine of ten of the runs left out need (conformal prediction over groups). For the coverage, that
factor is taken from the other groups: a run is held against what neither it nor its group has had a part in.
"""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, cast

from hardware_db.files import replace_text
from planner.cost.intervals import ANY_OTHER, BEYOND, REGIMES, TABLE, Extrapolation, Published, Width, Widths
from scripts.fit.interval_rows import AXES, ROWS, Axis, Row, near_and_far, read_rows, rows, size_of, written
from scripts.fit.published_rows import MEASUREMENTS
from scripts.fit.time_constants import ROWS_THAT_COUNT

COVERAGE = MEASUREMENTS / "interval_coverage.csv"
ALL = "all"
"""Name of all groups of an axis together."""
Figure = Literal["time", "memory", "room"]
FIGURES: tuple[Figure, ...] = ("time", "memory", "room")
"""Step times; memory of every run; and that of runs whose allocator had no cache to give back."""
SHARES: Mapping[Figure, float] = {"time": 0.9, "memory": 0.92, "room": 0.9}
"""What widths are to hold of what was left out. With nine of ten, bounds of memory held 83 % of models larger than
those that they came from."""
UNSPLIT: tuple[Figure, ...] = ("room",)
"""Figures of which too little was published to tell kinds of work and code bases apart, but for those without runs."""
FEWEST_PUBLICATIONS = 2
"""What a regime needs for a width of its own, and an architecture for counting as seen."""
LIKE = {"megatron": "nemo", "nemo": "megatron"}
"""NeMo trains with Megatron-LM's modules: what was published of one alone, speeds or memory, counts for the other."""
JOINS: Mapping[Figure, Literal["product", "sum"]] = {"time": "product", "memory": "sum", "room": "sum"}
"""Of times the size of an error matters, which differs by factors; of memory its sign too."""
NARROWEST: Mapping[Figure, float] = {"time": 0.03, "memory": 0.02, "room": 0.02}
"""The same run made again is off by that much (`planner.calibration.spread.AGAIN`), and what nvidia-smi shows of 80 GB
is rounded to 1 GB or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A run's figure: how far it is off (of memory, how far over), and what it weighs."""

    row: Row
    off: float
    weight: float

    @property
    def code(self) -> str:
        return self.row.code


def scores(runs: Iterable[Row], figure: Figure, axis: Axis = "publication") -> list[Score]:
    """Of the rows that print the figure, with constants that have not seen what an axis leaves out."""
    pairs = [(row, abs(row.time[axis]) if figure == "time" else getattr(row, figure)) for row in runs]
    printed = [(row, off) for row, off in pairs if not math.isnan(off)]
    counts = Counter((row.publication, row.code, row.under) for row, _ in printed)
    shares = (min(1 / counts[row.publication, row.code, row.under], 1 / ROWS_THAT_COUNT) for row, _ in printed)
    return [Score(row=row, off=off, weight=share) for (row, off), share in zip(printed, shares, strict=True)]


def quantile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """Of (value, weight) pairs: the smallest value that a share of the weight does not exceed."""
    ordered = sorted(weighted)
    wanted, passed = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= wanted * (1 - 1e-9):
            return value
    raise ValueError("no values")


def own(listed: Iterable[Score]) -> list[Score]:
    """Those that were predicted as the code that ran."""
    return [score for score in listed if score.row.is_own]


def widths(listed: Sequence[Score], figure: Figure) -> Widths:
    """Widths of scores, before anything is left out."""
    mine = own(listed)
    regimes = (
        {}
        if figure in UNSPLIT
        else {
            name: _width(part, figure)
            for name in REGIMES
            if _publications(part := [score for score in mine if score.row.stratum.regime == name])
            >= FEWEST_PUBLICATIONS
        }
    )
    regimes[ANY_OTHER] = _width(mine, figure)
    scaled = [
        (score, over(score.off, regimes.get(score.row.stratum.regime, regimes[ANY_OTHER]).width, figure))
        for score in listed
    ]
    names = sorted({score.code for score in mine})
    if figure in UNSPLIT:
        codes = dict.fromkeys(names, _published(mine, None, NEUTRAL[JOINS[figure]]))
    else:
        codes = {code: _published(mine, code, quantile(_mixed(scaled, code), SHARES[figure])) for code in names}
    codes[ANY_OTHER] = _published(mine, None, quantile(_mixed(scaled, ""), SHARES[figure]))
    seen = Counter(
        architecture for architecture, _ in {(_architecture(score), score.row.publication) for score in mine}
    )
    devices = {name: count for name, count in sorted(seen.items()) if count >= FEWEST_PUBLICATIONS}
    beyond = dict.fromkeys(BEYOND, Extrapolation(wider=NEUTRAL[JOINS[figure]], ratio=1.0))
    return Widths(joins=JOINS[figure], regimes=regimes, codes=codes, like=LIKE, devices=devices, beyond=beyond)


NEUTRAL = {"product": 1.0, "sum": 0.0}


def over(off: float, width: float, figure: Figure) -> float:
    """Return what a width has to be joined with to hold a run."""
    return off / width if JOINS[figure] == "product" else off - width


def joined(first: float, second: float, figure: Figure) -> float:
    return first * second if JOINS[figure] == "product" else first + second


def _width(part: Sequence[Score], figure: Figure) -> Width:
    width = max(NARROWEST[figure], quantile(((score.off, score.weight) for score in part), SHARES[figure]))
    return Width(width=width, runs=len(part), publications=_publications(part))


def _architecture(score: Score) -> str:
    return score.row.stratum.architecture


def _publications(listed: Iterable[Score]) -> int:
    return len({score.row.publication for score in listed})


def _published(mine: Sequence[Score], code: str | None, factor: float) -> Published:
    """Of one code base, or of all."""
    part = [score for score in mine if code in (None, score.code)]
    sizes = [(score.row.stratum.parameters, score.row.stratum.gpus) for score in part]
    parameters, gpus = zip(*sizes, strict=True)
    return Published(
        factor=factor,
        runs=len(part),
        publications=_publications(part),
        parameters=(min(parameters), max(parameters)),
        gpus=(min(gpus), max(gpus)),
    )


def _mixed(scaled: Sequence[tuple[Score, float]], code: str) -> Iterator[tuple[float, float]]:
    """Yield what the publications of a code base are off by, and as one publication more what code bases differ by.

    Of the latter every code base that ran weighs the same, and of each every one that it was predicted as.
    """
    yield from ((value, score.weight) for score, value in scaled if score.row.is_own and score.code == code)
    crossed = [pair for pair in scaled if not pair[0].row.is_own and code not in (pair[0].code, pair[0].row.under)]
    of_pair: defaultdict[tuple[str, str], float] = defaultdict(float)
    for score, _ in crossed:
        of_pair[score.code, score.row.under] += score.weight
    under = Counter(code for code, _ in of_pair)
    for score, value in crossed:
        pair = score.code, score.row.under
        yield value, score.weight / of_pair[pair] / under[score.code] / len(under)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A run that was left out: its group, and how far it is off over the width that the rest gives."""

    axis: Axis
    group: str
    score: Score
    width: float
    over: float


GROUPS: Mapping[Axis, Callable[[Row], str]] = {
    "publication": lambda row: row.publication,
    "code base": lambda row: row.code,
    "device": lambda row: row.stratum.architecture,
}


def left_out(runs: Sequence[Row], figure: Figure, axis: Axis, factors: Mapping[str, float]) -> list[Held]:
    """Every run against the widths of those that are not of its group.

    `factors` are what was already found to be missing: of publications, for code bases that have others, and of code
    bases that have none. Where a code base is left out its runs are predicted as other ones.
    """
    if axis not in GROUPS:
        return _by_size(runs, figure, axis, factors)
    group_of = GROUPS[axis]
    held = []
    for group in sorted({group_of(row) for row in runs}):
        rest = [row for row in runs if group_of(row) != group and (axis != "code base" or row.under != group)]
        table = widened(widths(scores(rest, figure, axis), figure), factors, figure)
        test = [row for row in runs if group_of(row) == group and row.is_own == (axis != "code base")]
        held += [_held(axis, group, score, table, figure) for score in scores(test, figure, axis)]
    return held


def _by_size(runs: Sequence[Row], figure: Figure, axis: Axis, factors: Mapping[str, float]) -> list[Held]:
    """The upper third of sizes against the lower one, by publication."""
    sizes = {id(row): size_of(axis, row.stratum.parameters, row.stratum.gpus) for row in runs}
    near, far = near_and_far(_sizes(own(scores(runs, figure)), axis))
    rest = [row for row in runs if sizes[id(row)] <= near]
    table = widened(widths(scores(rest, figure, axis), figure), factors, figure)
    test = [row for row in runs if sizes[id(row)] >= far and row.is_own]
    return [_held(axis, score.row.publication, score, table, figure) for score in scores(test, figure, axis)]


def _held(axis: Axis, group: str, score: Score, table: Widths, figure: Figure) -> Held:
    """Score a run that goes beyond the table; what that takes is looked for, and the table has nothing for it yet."""
    width = max(NARROWEST[figure], table.of(score.row.stratum))
    return Held(axis=axis, group=group, score=score, width=width, over=over(score.off, width, figure))


def widened(table: Widths, factors: Mapping[str, float], figure: Figure) -> Widths:
    """The table with what publications and code bases that are left out were found to need."""
    neutral = NEUTRAL[JOINS[figure]]
    by = {code: factors.get("code base" if code == ANY_OTHER else "publication", neutral) for code in table.codes}
    codes = {code: replace(row, factor=joined(row.factor, by[code], figure)) for code, row in table.codes.items()}
    return replace(table, codes=codes)


def missing(held: Iterable[Held], figure: Figure) -> float:
    """Return what widths are to be joined with to hold their share of what was left out; nothing where they do."""
    wanted = quantile(((one.over, one.score.weight) for one in held), SHARES[figure])
    return max(NEUTRAL[JOINS[figure]], wanted)


def _all_left_out(runs: Sequence[Row], figure: Figure) -> dict[Axis, list[Held]]:
    factors: dict[str, float] = {}
    held: dict[Axis, list[Held]] = {}
    for axis in AXES:
        held[axis] = left_out(runs, figure, axis, factors)
        factors[axis] = missing(held[axis], figure)
    return held


def fitted(runs: Sequence[Row], figure: Figure) -> tuple[Widths, dict[Axis, list[Held]]]:
    """The widths that the planner reads, and every run that was left out for them."""
    held = _all_left_out(runs, figure)
    factors = {axis: missing(some, figure) for axis, some in held.items()}
    table = widened(widths(scores(runs, figure), figure), factors, figure)
    beyond = {name: Extrapolation(wider=factors[name], ratio=_ratio(runs, figure, name)) for name in BEYOND}
    return replace(table, beyond=beyond), held


def _ratio(runs: Sequence[Row], figure: Figure, axis: Axis) -> float:
    """Return how far apart the sizes are that an extrapolation goes from and to."""
    if axis in GROUPS:
        return 1.0
    near, far = near_and_far(_sizes(own(scores(runs, figure)), axis))
    return max(abs(near), abs(far)) / min(abs(near), abs(far))


def _sizes(listed: Iterable[Score], axis: Axis) -> list[int]:
    return [size_of(axis, score.row.stratum.parameters, score.row.stratum.gpus) for score in listed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Of one group that was left out, or of all of an axis."""

    figure: Figure
    axis: Axis
    group: str
    runs: int
    inside: float
    """Share of the runs."""
    weighted: float
    """The same where no publication counts more than another of ten runs."""
    median_off: float
    """Of |measured / predicted - 1|, of runs left out; of memory with its sign, over what is needed."""
    median_fit: float
    """The same with the constants that are shipped. No constant was fitted to memory."""
    width: float
    """Median of upper over lower end; of memory, of the bound over what is needed."""


def coverage(held: Sequence[Held], figure: Figure) -> list[Coverage]:
    """By group, each against the factor of the others, and last of all groups together."""
    inside: list[tuple[Held, float]] = []
    for group in sorted({one.group for one in held}):
        factor = missing((one for one in held if one.group != group), figure)
        inside += [(one, factor) for one in held if one.group == group]
    groups = sorted({one.group for one in held})
    parts = [(group, [pair for pair in inside if pair[0].group == group]) for group in groups]
    return [_covered(figure, name, part) for name, part in [*parts, (ALL, inside)]]


def _share(off: float) -> float:
    """A logarithm as a share."""
    return math.exp(off) - 1


def _covered(figure: Figure, group: str, part: Sequence[tuple[Held, float]]) -> Coverage:
    hits = [(one.over <= factor, one.score.weight) for one, factor in part]
    sides = 2 if figure == "time" else 1
    ends = [math.exp(sides * joined(one.width, factor, figure)) for one, factor in part]
    return Coverage(
        figure=figure,
        axis=part[0][0].axis,
        group=group,
        runs=len(part),
        inside=statistics.mean(hit for hit, _ in hits),
        weighted=sum(weight for hit, weight in hits if hit) / sum(weight for _, weight in hits),
        median_off=statistics.median(_share(one.score.off) for one, _ in part),
        median_fit=statistics.median(
            _share(abs(one.score.row.shipped) if figure == "time" else one.score.off) for one, _ in part
        ),
        width=statistics.median(ends),
    )


def document(tables: Mapping[Figure, Widths], runs: Sequence[Row]) -> str:
    """The file that the planner reads."""
    counts = f"{len({row.case for row in runs})} runs of {len({row.publication for row in runs})} publications"
    source = f"python -m scripts.fit.intervals, {counts} (hardware_db/measurements/interval_rows.csv)"
    return json.dumps({"source": source} | {name: _rounded(asdict(table)) for name, table in tables.items()}, indent=1)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def coverage_text(covered: Iterable[Coverage]) -> str:
    """Rows of the file of coverages."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [item.name for item in fields(Coverage)]
    writer.writerow(names)
    for one in covered:
        values = (getattr(one, name) for name in names)
        writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in values])
    return text.getvalue()


def read_coverage() -> list[Coverage]:
    """The coverages of the file."""
    with COVERAGE.open(newline="", encoding="utf-8") as lines:
        return [
            Coverage(
                figure=cast("Figure", row["figure"]),
                axis=cast("Axis", row["axis"]),
                group=row["group"],
                runs=int(row["runs"]),
                inside=float(row["inside"]),
                weighted=float(row["weighted"]),
                median_off=float(row["median_off"]),
                median_fit=float(row["median_fit"]),
                width=float(row["width"]),
            )
            for row in csv.DictReader(lines)
        ]


def report(covered: Iterable[Coverage], tables: Mapping[Figure, Widths]) -> Iterator[str]:
    """Coverages, and the widths that the planner reads."""
    yield "figure  left out       group                       runs  inside weighted    off    fit  width"
    for one in covered:
        cells = f"{one.inside:7.0%} {one.weighted:8.0%} {one.median_off:6.1%} {one.median_fit:6.1%} {one.width:6.2f}"
        yield f"{one.figure:7} {one.axis:14} {one.group:26} {one.runs:5} {cells}"
    for figure, table in tables.items():
        for name, regime in table.regimes.items():
            yield f"{figure:7} {name:20} {regime.width:6.3f}  {regime.runs} runs, {regime.publications} publications"
        for code, row in table.codes.items():
            yield f"{figure:7} {code:20} {row.factor:6.2f}  {row.runs} runs, {row.publications} publications"
        yield f"{figure:7} beyond: " + ", ".join(
            f"{name} {each.wider:.2f} over {each.ratio:.3g}x" for name, each in table.beyond.items()
        )


def main() -> None:
    if "--anew" in sys.argv[1:]:
        replace_text(ROWS, written(rows()))
    runs = read_rows()
    tables: dict[Figure, Widths] = {}
    covered: list[Coverage] = []
    for figure in FIGURES:
        tables[figure], held = fitted(runs, figure)
        covered += [one for axis in AXES for one in coverage(held[axis], figure)]
    replace_text(TABLE, document(tables, runs) + "\n")
    replace_text(COVERAGE, coverage_text(covered))
    print("\n".join(report(covered, tables)))


if __name__ == "__main__":
    main()
