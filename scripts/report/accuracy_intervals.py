"""The part of the accuracy report on intervals of step times and bounds of memory: how many runs left out they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.cost.intervals import TABLE, Extrapolation, Published, Widths, read_tables
from scripts.fit.interval_rows import AXES, Axis
from scripts.fit.intervals import ALL, FIGURES, JOINS, SHARES, Coverage, Figure, read_coverage
from scripts.report.accuracy_tables import table

HEAD = """
## Intervals and bounds of what nobody looked at

Nine of ten steps should take a time inside the interval that a prediction carries, and nine of ten runs stay below the
upper bound of memory, **on publications, code bases, GPUs and sizes that neither the constants nor the widths have
seen**. Each is left out in turn: constants of the time model and widths come from the others, and what those lacked on
still others widens them (conformal prediction over groups; `python -m scripts.fit.intervals`). Of a code base that is
left out its traits are not seen either: its runs are predicted as every other code base that can do the same work. Of
sizes the upper third is predicted from the lower one, and the other way round. No publication counts more than another
of ten runs in *inside*; *of all runs* counts each run. *Off* is the median error on what was left out, *of the fit*
that of the same runs with the constants that are shipped. *Width* is what an interval costs: the median of its upper
over its lower end, of memory the bound over what is said to need.

Memory has two bounds. What a run *shows* holds the allocator's cache, which grows while there is room. What it
*requires* is that of runs whose figure holds none, or that left less than a quarter of the device free: this decides
between "fits" and "tight". Of the latter too little was published to tell kinds of work and code bases apart, but for
code bases without any.
"""
GROUPS = """
### {title}, each {axis} left out
"""
WIDTHS = """
### Widths that a prediction gets

Of a job the width of its kind of work, with what its code base adds to it, and with what sizes beyond those published
of the code base and GPUs of an architecture that fewer than two publications ran on add. A code base without
published runs has the row *any other*: as far as code bases differ from each other.
"""
TITLES: dict[Figure, str] = {
    "time": "step time",
    "memory": "memory that shows",
    "room": "memory that is required",
}
SMALLEST_GROUPS: tuple[Axis, ...] = ("publication", "code base", "device")


def intervals() -> Iterator[str]:
    """The lines of the section."""
    covered = read_coverage()
    yield HEAD
    columns = ("", "left out", "groups", "runs", "inside", "of all runs", "off", "of the fit", "width")
    yield from table(columns, _summary(covered))
    for figure in FIGURES:
        for axis in SMALLEST_GROUPS:
            yield GROUPS.format(title=TITLES[figure].capitalize(), axis=axis)
            part = [one for one in covered if (one.figure, one.axis) == (figure, axis) and one.group != ALL]
            cells = ([one.group, *_cells(one)] for one in part)
            yield from table((axis, *columns[3:]), cells)
    yield WIDTHS
    yield from _widths()


def _summary(covered: Sequence[Coverage]) -> Iterator[list[str]]:
    for figure in FIGURES:
        for axis in AXES:
            own = [one for one in covered if (one.figure, one.axis) == (figure, axis)]
            (total,) = (one for one in own if one.group == ALL)
            yield [TITLES[figure], axis, str(len(own) - 1), *_cells(total)]


def _cells(one: Coverage) -> list[str]:
    signed = "+.1%" if JOINS[one.figure] == "sum" else ".1%"
    medians = [f"{one.median_off:{signed}}", f"{one.median_fit:{signed}}"]
    return [str(one.runs), f"{one.weighted:.0%}", f"{one.inside:.0%}", *medians, f"{one.width:.2f}"]


def _widths() -> Iterator[str]:
    tables = read_tables(TABLE)
    columns = ("", "kind of work", "share", "stays within", "runs", "publications")
    yield from table(
        columns,
        (
            [TITLES[figure], name, f"{SHARES[figure]:.0%}", _share(row.width), str(row.runs), str(row.publications)]
            for figure in FIGURES
            for name, row in tables[figure].regimes.items()
        ),
    )
    yield ""
    columns = ("", "code base", "plain runs within", "runs", "publications", "parameters", "GPUs")
    yield from table(
        columns,
        (
            [TITLES[figure], *_code(tables[figure], code, row)]
            for figure in FIGURES
            for code, row in tables[figure].codes.items()
        ),
    )
    yield ""
    yield from table(
        ("", *tables["time"].beyond),
        ([TITLES[figure], *(_wider(figure, each) for each in tables[figure].beyond.values())] for figure in FIGURES),
    )


def _code(widths: Widths, code: str, row: Published) -> list[str]:
    plain = widths.regime("plain").width
    width = plain * row.factor if widths.joins == "product" else plain + row.factor
    smallest, largest = row.parameters
    sizes = f"{smallest / 1e9:.2g} to {largest / 1e9:.3g} billion", f"{row.gpus[0]:,} to {row.gpus[1]:,}"
    return [code, _share(width), str(row.runs), str(row.publications), *sizes]


def _share(width: float) -> str:
    return f"{math.exp(width) - 1:+.0%}"


def _wider(figure: Figure, each: Extrapolation) -> str:
    wider = f"x {each.wider:.2f}" if JOINS[figure] == "product" else _share(each.wider)
    return wider if each.ratio == 1 else f"{wider} ({each.ratio:.3g} times)"
