"""The most probable factors for a set of measured runs: Levenberg-Marquardt with Gaussian priors and a robust error.

With residuals r_i = log(measured / predicted) / scale_i, which depend on the logarithms theta of the factors, this
minimises

    sum_i (nu + 1) / 2 log(1 + r_i² / (nu s²))  +  sum_j theta_j² / (2 prior_j²)

for Student's t with nu = 4 degrees of freedom, whose heavy tails let one run that another job disturbed weigh little.
s, the spread that is left, is found beside theta by expectation-maximisation (Lange, Little and Taylor 1989, Robust
statistical modeling using the t distribution), starting from `noise`, which counts as much as `noise.rows` more runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hardware_db.records import dataclass
from planner.calibration.calibration import Matrix, Vector, quadratic

# Small symmetric systems, without numpy: a handful of unknowns.


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Vector:
    """Return x of `matrix x = right` for a symmetric positive definite matrix, by Cholesky's decomposition."""
    lower = _cholesky(matrix)
    size = len(right)
    forward: list[float] = []
    for i in range(size):
        forward.append((right[i] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (forward[i] - sum(lower[k][i] * solution[k] for k in range(i + 1, size))) / lower[i][i]
    return tuple(solution)


def inverse(matrix: Sequence[Sequence[float]]) -> Matrix:
    """Return the inverse of a symmetric positive definite matrix."""
    size = len(matrix)
    return tuple(solve(matrix, [float(i == column) for i in range(size)]) for column in range(size))


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    return lower


FREEDOM = 4.0
"""Degrees of freedom of the error: few enough for outliers, enough for a variance."""
TAILS = 2.132 / 1.645
"""The spread of a normal distribution over that of the error with the same ninth decile, as Student's t has it."""
_STEP = 1e-4
_DAMPING = 1e-3
_ROUNDS = 20
_TRIES = 8
_SETTLED = 1e-3
_NEAR = 0.05
"""How far values may move before the slopes are worked out again: over 5 % of a rate they hardly change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """A factor before any run: its logarithm is 0, give or take `spread` (one standard deviation)."""

    name: str
    spread: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The spread of residuals to expect, and how many runs that expectation is worth."""

    spread: float = 1.0
    rows: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Result of a fit.

    `values` are logarithms of the factors, `covariance` their posterior covariance, `spread` what the residuals keep,
    in the residuals' own unit.
    """

    names: tuple[str, ...]
    values: Vector
    covariance: Matrix
    spread: float

    @property
    def factors(self) -> dict[str, float]:
        """The factors themselves, by name."""
        return {name: math.exp(value) for name, value in zip(self.names, self.values, strict=True)}

    def variance(self, gradient: Sequence[float]) -> float:
        """Return how uncertain a figure is that changes by `gradient` with each value."""
        return quadratic(self.covariance, gradient)


Residuals = Callable[[Sequence[float]], Sequence[float]]


def fit(
    residuals: Residuals, priors: Sequence[Prior], noise: Noise | None = None, start: Sequence[float] | None = None
) -> Fit:
    """Return the most probable values; `residuals` and `start`, a guess, have the logarithms in the order of `priors`.

    With no residuals at all the answer is the prior: zeros, its variances, and the expected spread.
    """
    expected = noise or Noise()
    problem = _Problem(residuals=residuals, priors=tuple(priors))
    here = problem.at((0.0,) * len(priors) if start is None else tuple(start))
    spread = expected.spread
    for _ in range(_ROUNDS):
        before = here
        here = problem.descend(here, spread)
        spread = problem.spread_left(here, spread, expected)
        if here is before or _moved(before, here) < _SETTLED:
            break
    covariance = inverse(problem.curvature(here, spread))
    names = tuple(prior.name for prior in priors)
    return Fit(names=names, values=here.values, covariance=covariance, spread=spread)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """Values with the residuals there, and how residuals change with each value, worked out at `origin` nearby."""

    values: Vector
    residuals: tuple[float, ...]
    origin: Vector
    columns: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    residuals: Residuals
    priors: tuple[Prior, ...]

    def at(self, values: Vector) -> _Point:
        """Return the point moved there, with slopes of its own."""
        residuals = tuple(self.residuals(values))
        columns = []
        for index in range(len(values)):
            beside = tuple(value + _STEP * (i == index) for i, value in enumerate(values))
            moved = self.residuals(beside)
            columns.append(tuple((there - here) / _STEP for there, here in zip(moved, residuals, strict=True)))
        return _Point(values=values, residuals=residuals, origin=values, columns=tuple(columns))

    def cost(self, values: Vector, residuals: Sequence[float], spread: float) -> float:
        """Return the negative logarithm of the posterior, up to a constant."""
        misfit = sum(math.log1p((r / spread) ** 2 / FREEDOM) for r in residuals)
        pull = sum((value / prior.spread) ** 2 for value, prior in zip(values, self.priors, strict=True))
        return (FREEDOM + 1) / 2 * misfit + pull / 2

    def downhill(self, point: _Point, spread: float) -> list[float]:
        """Return the negative gradient of the cost."""
        weights = _weights(point, spread)
        return [
            -sum(w * c * r for w, c, r in zip(weights, column, point.residuals, strict=True)) - value / prior.spread**2
            for column, value, prior in zip(point.columns, point.values, self.priors, strict=True)
        ]

    def curvature(self, point: _Point, spread: float) -> list[list[float]]:
        """Return the cost's curvature, as Gauss and Newton approximate it."""
        weights = _weights(point, spread)
        curvature = [
            [sum(w * a * b for w, a, b in zip(weights, column, other, strict=True)) for other in point.columns]
            for column in point.columns
        ]
        for index, prior in enumerate(self.priors):
            curvature[index][index] += 1 / prior.spread**2
        return curvature

    def descend(self, point: _Point, spread: float) -> _Point:
        """One accepted step of Levenberg and Marquardt, or the same point where none goes down."""
        downhill, curvature = self.downhill(point, spread), self.curvature(point, spread)
        here, damping = self.cost(point.values, point.residuals, spread), _DAMPING
        for _ in range(_TRIES):
            damped = [
                [figure * (1 + damping) if i == j else figure for j, figure in enumerate(row)]
                for i, row in enumerate(curvature)
            ]
            step = solve(damped, downhill)
            values = tuple(value + move for value, move in zip(point.values, step, strict=True))
            residuals = tuple(self.residuals(values))
            if self.cost(values, residuals, spread) < here:
                near = all(abs(value - old) < _NEAR for value, old in zip(values, point.origin, strict=True))
                return replace(point, values=values, residuals=residuals) if near else self.at(values)
            damping *= 10
        return point

    def spread_left(self, point: _Point, spread: float, noise: Noise) -> float:
        """Return the next estimate of the spread; factors that the runs determine take degrees of freedom from them."""
        weighted = sum(_weight(r, spread) * r**2 for r in point.residuals)
        covariance = inverse(self.curvature(point, spread))
        taken = sum(1 - covariance[i][i] / prior.spread**2 for i, prior in enumerate(self.priors))
        rows = noise.rows + max(len(point.residuals) - taken, 0.0)
        return math.sqrt((weighted + noise.rows * noise.spread**2) / rows)


def _weights(point: _Point, spread: float) -> list[float]:
    return [_weight(r, spread) / spread**2 for r in point.residuals]


def _weight(residual: float, spread: float) -> float:
    """Return how much a run counts: 1.25 where it is as expected, ever less the further off it is."""
    return (FREEDOM + 1) / (FREEDOM + (residual / spread) ** 2)


def _moved(before: _Point, after: _Point) -> float:
    return max((abs(new - old) for new, old in zip(after.values, before.values, strict=True)), default=0.0)
