"""The fit: it finds what is there, ignores what is not, and knows how sure it is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from planner.calibration.calibration import quadratic
from planner.calibration.fit import Fit, Noise, Prior, fit, inverse, solve

PRIORS = (Prior(name="compute", spread=0.3), Prior(name="link", spread=0.5))


def _runs(count: int, seed: int = 1) -> list[tuple[float, float]]:
    """Seconds of computing and of communication of some runs."""
    chance = random.Random(seed)
    return [(chance.uniform(0.5, 2.0), chance.uniform(0.1, 1.5)) for _ in range(count)]


def _fitted(
    runs: Sequence[tuple[float, float]],
    truth: tuple[float, float],
    *,
    noise: Sequence[float] = (),
    scale: float = 0.05,
) -> Fit:
    """The fit to runs of a machine with these true factors, each run off by its own `noise` (a logarithm)."""
    errors = [*noise, *[0.0] * (len(runs) - len(noise))]
    measured = [
        (compute / truth[0] + link / truth[1]) * math.exp(error)
        for (compute, link), error in zip(runs, errors, strict=True)
    ]

    def residuals(values: Sequence[float]) -> list[float]:
        compute_factor, link_factor = (math.exp(value) for value in values)
        return [
            math.log(seconds / (compute / compute_factor + link / link_factor)) / scale
            for (compute, link), seconds in zip(runs, measured, strict=True)
        ]

    return fit(residuals, PRIORS)


def test_without_a_run_the_answer_is_the_prior() -> None:
    fitted = fit(lambda values: [], PRIORS, Noise(spread=0.7))
    assert fitted.values == (0.0, 0.0)
    assert fitted.factors == {"compute": 1.0, "link": 1.0}
    assert [fitted.covariance[i][i] for i in range(2)] == pytest.approx([0.09, 0.25])
    assert fitted.spread == pytest.approx(0.7)


def test_exact_runs_give_the_true_factors() -> None:
    fitted = _fitted(_runs(40), (0.8, 1.4))
    assert fitted.factors["compute"] == pytest.approx(0.8, rel=0.01)
    assert fitted.factors["link"] == pytest.approx(1.4, rel=0.02)
    assert fitted.spread < 0.5


def test_a_factor_that_no_run_needs_stays_where_it_was() -> None:
    fitted = _fitted([(compute, 0.0) for compute, _ in _runs(10)], (0.7, 3.0))
    assert fitted.factors["compute"] == pytest.approx(0.7, rel=0.02)
    assert fitted.factors["link"] == 1.0
    assert fitted.covariance[1][1] == pytest.approx(0.25)


def test_one_run_moves_the_factors_less_than_ten_do() -> None:
    one, ten = (_fitted(_runs(count), (0.6, 0.6), scale=0.3).factors["compute"] for count in (1, 10))
    assert 0.6 < ten < one < 1.0


def test_a_disturbed_run_hardly_counts() -> None:
    calm = _fitted(_runs(12), (0.8, 1.2))
    disturbed = _fitted(_runs(12), (0.8, 1.2), noise=[1.5])
    for name in ("compute", "link"):
        assert disturbed.factors[name] == pytest.approx(calm.factors[name], rel=0.03)


def test_the_spread_is_that_of_the_errors_and_the_truth_lies_within_the_posterior() -> None:
    chance = random.Random(5)
    inside = []
    for trial in range(60):
        errors = [chance.gauss(0, 0.1) for _ in range(25)]
        fitted = _fitted(_runs(25, trial), (0.85, 1.25), noise=errors, scale=0.1)
        assert 0.5 < fitted.spread < 1.5
        off = [value - math.log(true) for value, true in zip(fitted.values, (0.85, 1.25), strict=True)]
        inside += [abs(error) < 1.645 * math.sqrt(fitted.covariance[i][i]) for i, error in enumerate(off)]
    assert 0.8 < sum(inside) / len(inside) < 0.99


def test_the_variance_of_a_prediction_falls_with_runs() -> None:
    few, many = _fitted(_runs(2), (0.8, 1.2)), _fitted(_runs(30), (0.8, 1.2))
    assert many.variance((-0.7, -0.3)) < few.variance((-0.7, -0.3)) / 3
    assert few.variance((0.0, 0.0)) == 0.0


def test_small_systems_are_solved() -> None:
    matrix = ((4.0, 1.0, 0.5), (1.0, 3.0, 0.2), (0.5, 0.2, 2.0))
    solution = solve(matrix, (1.0, 2.0, 3.0))
    assert [sum(a * b for a, b in zip(row, solution, strict=True)) for row in matrix] == pytest.approx([1, 2, 3])
    product = [[sum(a * b for a, b in zip(row, column, strict=True)) for column in inverse(matrix)] for row in matrix]
    assert [value for row in product for value in row] == pytest.approx([1, 0, 0, 0, 1, 0, 0, 0, 1], abs=1e-12)
    assert quadratic(matrix, (1.0, 0.0, -1.0)) == pytest.approx(5.0)
