"""Errors summed up, and markdown tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hardware_db.units import GIB
from scripts.report.accuracy_cases import Case


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of signed errors: how many, the median and 90th percentile of their sizes, the largest above and below zero."""

    cases: int
    median: float
    p90: float
    over: float
    under: float

    @property
    def worst(self) -> float:
        return max(self.over, -self.under)

    @property
    def cells(self) -> list[str]:
        return [str(self.cases), f"{self.median:.1%}", f"{self.p90:.1%}", f"{self.over:+.1%}", f"{self.under:+.1%}"]


SPREAD_COLUMNS = ("cases", "median size", "90 % within", "most over", "most under")


def spread(errors: Iterable[float]) -> Spread:
    """Raises ValueError where there is no error."""
    signed = sorted(errors)
    sizes = sorted(map(abs, signed))
    return Spread(
        cases=len(signed),
        median=statistics.median(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        over=max(signed[-1], 0.0),
        under=min(signed[0], 0.0),
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a markdown table."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def grouped(cases: Sequence[Case], name: str, of: Callable[[Case], str]) -> Iterator[str]:
    """A table with a row of errors for each group, groups in alphabetical order."""
    groups = sorted({of(case) for case in cases})
    rows = ([group, *spread(case.error for case in cases if of(case) == group).cells] for group in groups)
    yield from table((name, *SPREAD_COLUMNS), rows)


def listed(cases: Sequence[Case]) -> Iterator[str]:
    """Every case with both figures, in order."""
    columns = ("case", "model", "how", "figure", "measured GiB", "predicted GiB", "error")
    yield from table(
        columns,
        (
            [case.name, case.model, case.how, case.kind, gib(case.measured), gib(case.predicted), f"{case.error:+.1%}"]
            for case in cases
        ),
    )


def gib(value: float) -> str:
    """GiB with three digits that matter."""
    size = value / GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}" if size >= 1 else f"{size:.3f}"
