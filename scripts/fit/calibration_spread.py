"""Measures how much hardware and code differ from what is shipped, and what is left once their factors are fitted.

Every publication is taken for one user: its runs as they were predicted when it was left out of the fit of the shipped
constants. The spread of each factor over publications is found by empirical Bayes: the factors of each are fitted with
the spreads so far as priors, and the spreads are worked out again from what was found, until they settle.

python -m scripts.fit.calibration_spread [--all]      only runs whose whole plan is stated, or of every reading
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from planner.calibration.fit import Fit, Noise, Prior, fit
from planner.calibration.learn import with_factors
from planner.calibration.spread import FACTOR_SPREADS, NINE_OF_TEN, kind_of, slopes
from planner.cost.timing import step_time
from planner.types.cluster import Factors
from scripts.fit.time_accuracy import read_left_out
from scripts.fit.time_constants import ROWS_THAT_COUNT
from scripts.fit.time_scores import Scored

_ROUNDS = 4
_START = 0.2
_NOISE = Noise(spread=0.08, rows=2)
_FELT = 0.02
_FEWEST_PUBLICATIONS = 3
_MOST_ROWS = 48
"""Of a publication with more runs, evenly spaced ones are taken."""


def fitted(rows: Sequence[Scored], spreads: Mapping[str, float]) -> Fit:
    """The factors of one publication, of those that its runs feel."""
    priors = [Prior(name=name, spread=spread) for name, spread in spreads.items() if _felt(rows, name)]

    def residuals(values: Sequence[float]) -> list[float]:
        factors = Factors(**{prior.name: math.exp(value) for prior, value in zip(priors, values, strict=True)})
        return [row.log_error - _change(row, factors) for row in rows]

    return fit(residuals, priors, _NOISE)


def spreads_over(publications: Mapping[str, Sequence[Scored]]) -> tuple[dict[str, float], dict[str, Fit]]:
    """The spread of each factor over publications, and the factors of each."""
    spreads = dict.fromkeys(FACTOR_SPREADS, _START)
    fits: dict[str, Fit] = {}
    for _ in range(_ROUNDS):
        fits = {name: fitted(rows, spreads) for name, rows in publications.items()}
        for name in spreads:
            seen = [
                own.values[index] ** 2 + own.covariance[index][index]
                for own in fits.values()
                for index, factor in enumerate(own.names)
                if factor == name
            ]
            if len(seen) >= _FEWEST_PUBLICATIONS:
                spreads[name] = math.sqrt(sum(seen) / len(seen))
    return spreads, fits


def left(publications: Mapping[str, Sequence[Scored]], fits: Mapping[str, Fit]) -> dict[str, tuple[float, int]]:
    """By kind of plan: the ninth decile of what the factors leave, over NINE_OF_TEN, and how many runs."""
    sizes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, rows in publications.items():
        factors = Factors(**fits[name].factors)
        taken = len(rows) / max(1.0, len(rows) - len(fits[name].names))
        weight = min(1.0, ROWS_THAT_COUNT / len(rows))
        for row in rows:
            rest = abs(row.log_error - _change(row, factors)) * math.sqrt(taken)
            sizes[kind_of(row.run.job)].append((rest, weight))
    return {kind: (_ninth_decile(sized) / NINE_OF_TEN, len(sized)) for kind, sized in sizes.items()}


def _ninth_decile(weighted: Sequence[tuple[float, float]]) -> float:
    wanted, passed = 0.9 * sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        passed += weight
        if passed >= wanted:
            return value
    return max(value for value, _ in weighted)


def _felt(rows: Sequence[Scored], name: str) -> bool:
    return any(abs(slopes(row.run.job, lambda job: step_time(job).step_seconds)[name]) > _FELT for row in rows[:40])


def _change(row: Scored, factors: Factors) -> float:
    """Return what factors add to the logarithm of the prediction."""
    job = row.run.job
    return math.log(step_time(with_factors(job, factors)).step_seconds / step_time(job).step_seconds)


def main() -> None:
    publications: dict[str, list[Scored]] = defaultdict(list)
    for row in read_left_out():
        if row.run.reading == "stated" or "--all" in sys.argv:
            publications[row.run.document].append(row)
    taken = {name: rows[:: -(-len(rows) // _MOST_ROWS)] for name, rows in publications.items()}
    spreads, fits = spreads_over(taken)
    print("factor          spread over publications")
    for name, spread in spreads.items():
        seen = [own.factors[name] for own in fits.values() if name in own.names]
        shown = ", ".join(f"{value:.2f}" for value in sorted(seen)) or "felt by none"
        print(f"{name:15} {spread:.2f}   {shown}")
    print("kind            left once fitted    runs")
    for kind, (spread, runs) in left(publications, fits).items():
        print(f"{kind:15} {spread:.3f}   {runs}")


if __name__ == "__main__":
    main()
