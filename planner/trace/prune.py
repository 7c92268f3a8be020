"""Prune: of the moments of a part, those that are the largest for some model."""

from __future__ import annotations

from collections.abc import Sequence

from planner.memory.dimensions import Dimensions
from planner.memory.form import Moment
from planner.memory.polynomial import Polynomial, value

_TOLERANCE = 0.002
"""A moment is left out where another is within this share of it."""
_WEIGHTS = ((2.0, 0.0), (4.0, 1.0), (0.0, 0.0), (6.0, 0.0))
"""Bytes per element of a gradient, and whether cast copies count, as strategies have it."""


def telling(points: Sequence[Dimensions], moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """The fewest moments that come within 0.2 % of the largest at every point."""
    pool = list({str((m.activations, m.cast, m.gradients)): m for m in moments}.values())
    terms = {term for moment in pool for part in _parts(moment) for term in part}
    rows = []
    for point in points:
        worth = {term: value({term: 1.0}, point) for term in terms}
        sizes = [tuple(_size(part, worth) for part in _parts(moment)) for moment in pool]
        rows += [
            [activations + on * cast + per_element * gradients for activations, cast, gradients in sizes]
            for per_element, on in _WEIGHTS
        ]
    return tuple(pool[index] for index in sorted(_cover(rows, len(pool))))


def _parts(moment: Moment) -> tuple[Polynomial, ...]:
    return moment.activations, moment.cast, moment.gradients


def _size(polynomial: Polynomial, worth: dict[str, float]) -> float:
    return sum(coefficient * worth[term] for term, coefficient in polynomial.items())


def _cover(rows: list[list[float]], count: int) -> set[int]:
    """Greedy: the moment that is good enough in most of the rows not yet covered, until all are."""
    good = [
        {index for index in range(count) if row[index] >= max(row) - _TOLERANCE * abs(max(row))} for row in rows if row
    ]
    chosen: set[int] = set()
    while good:
        votes = [sum(index in row for row in good) for index in range(count)]
        best = votes.index(max(votes))
        chosen.add(best)
        good = [row for row in good if best not in row]
    return chosen
