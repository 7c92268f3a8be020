"""Polynomial: a number of bytes (or elements) as a sum of products of a model's and a batch's dimensions.

`{"b s h": 4.0}` is 4 x b x s x h: keys are symbols in alphabetical order, with blanks between, and "" is the constant
term. `planner.memory.dimensions` says what each symbol stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

Polynomial: TypeAlias = Mapping[str, float]
ZERO: Polynomial = {}


def added(polynomials: Iterable[Polynomial]) -> dict[str, float]:
    """The sum, without terms that cancel."""
    total: dict[str, float] = {}
    for polynomial in polynomials:
        for term, coefficient in polynomial.items():
            total[term] = total.get(term, 0.0) + coefficient
    return {term: value for term, value in total.items() if value}


def scaled(polynomial: Polynomial, factor: float) -> dict[str, float]:
    """Every coefficient times `factor`."""
    return {term: coefficient * factor for term, coefficient in polynomial.items()}


def subtracted(left: Polynomial, right: Polynomial) -> dict[str, float]:
    """`left` less `right`."""
    return added((left, scaled(right, -1.0)))


def multiplied(left: Polynomial, right: Polynomial) -> dict[str, float]:
    """The product."""
    return added(
        {" ".join(sorted((*first.split(), *second.split()))): one * other}
        for first, one in left.items()
        for second, other in right.items()
    )


def value(polynomial: Polynomial, dimensions: Mapping[str, float]) -> float:
    """The number, with every symbol replaced.

    Raises:
        KeyError: a symbol has no value.
    """
    total = 0.0
    for term, coefficient in polynomial.items():
        for symbol in term.split():
            coefficient *= dimensions[symbol]
        total += coefficient
    return total


def per_sample(polynomial: Polynomial, dimensions: Mapping[str, float]) -> tuple[float, float]:
    """What does not depend on the samples of a batch (symbol `b`), and what each sample adds; `b` is left out of
    `dimensions`. No activation grows faster than the batch.

    Raises:
        KeyError: a symbol has no value.
    """
    fixed = grows = 0.0
    for term, coefficient in polynomial.items():
        symbols = term.split()
        batched = "b" in symbols
        for symbol in symbols:
            if symbol != "b":
                coefficient *= dimensions[symbol]
        if batched:
            grows += coefficient
        else:
            fixed += coefficient
    return fixed, grows
