"""Prune: of the moments of a part, those that are the largest for some model."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from planner.memory.form import Moment
from planner.memory.polynomial import Polynomial, value

_TOLERANCE = 0.002
"""A moment is left out where another is within this share of it."""
_WEIGHTS = ((2.0, 0.0), (4.0, 1.0), (0.0, 0.0), (6.0, 0.0))
"""Bytes per element of a gradient, and whether cast copies count, as strategies have it."""


def telling(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """The fewest moments that, over many plausible models and batches, come within 0.2 % of the largest."""
    pool = list({str((m.activations, m.cast, m.gradients)): m for m in moments}.values())
    terms = {term for moment in pool for part in _parts(moment) for term in part}
    rows = []
    for point in _points():
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


@functools.cache
def _points() -> tuple[dict[str, float], ...]:
    chance = random.Random(0)
    return tuple(_point(chance) for _ in range(40))


def _point(chance: random.Random) -> dict[str, float]:
    """A plausible model and batch."""
    values = {name: float(chance.choice(choices)) for name, choices in RANGES.items()}
    values["a"] = values["h"] / values["d"] * chance.choice((0.5, 1, 1, 2))
    values["r"] = min(values["r"], values["a"])
    values["g"] = values["a"] / values["r"]
    values["f"] = values["h"] * chance.choice((2.7, 3.5, 4, 5.5, 8))
    return values | {"F": values["f"]}


RANGES: dict[str, tuple[float, ...]] = {
    "b": (1, 2, 4, 8, 16, 64),
    "s": (128, 512, 2048, 8192, 32768),
    "t": (196, 512, 1500, 2048),
    "h": (512, 1024, 2048, 4096, 8192),
    "d": (64, 128, 256),
    "r": (1, 4, 8, 32),
    "V": (30522, 50257, 128256, 256000),
    "P": (512, 2048, 8192),
    "R": (16, 32, 64, 128),
    "w": (128, 512, 4096),
    "e": (128, 512),
    "j": (512, 1024),
    "E": (8, 32, 64, 128, 256),
    "k": (1, 2, 4, 8),
    "m": (512, 1408, 2048, 14336),
    "x": (1408, 5632, 8192),
    "ql": (1536,),
    "kl": (512,),
    "n": (128,),
    "o": (64,),
    "v": (128,),
    "H": (768, 1024, 1152),
    "A": (12, 16),
    "D": (64, 72),
    "G": (3072, 4096),
    "M": (80, 128),
    "C": (3,),
    "p": (14, 16, 32),
    "I": (224, 336, 896),
    "y": (256,),
    "c": (512, 768, 1000),
}
"""What models and batches look like; the rest follows from these."""
