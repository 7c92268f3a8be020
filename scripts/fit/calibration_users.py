"""Measures what ten runs of one user's model are worth on the next ten, with published runs for users.

A user is one model of one publication with twenty runs or more. Before the first run, predictions are those of
constants from which the whole publication was left out; then its factors are fitted to ten of its runs, drawn by
chance, and ten others are predicted. Medians over several draws.

python -m scripts.fit.calibration_users
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from planner.calibration.learn import Row, errors, fit_factors
from planner.cost.timing import step_time
from planner.types.cluster import SHIPPED, Factors
from planner.types.job import Job
from scripts.fit.time_accuracy import read_left_out
from scripts.fit.time_scores import Scored

RUNS = 10
_DRAWS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Median error on the next ten runs, before any run and after ten, fractions of the step time."""

    source: str
    model: str
    runs: int
    before: float
    after: float


def users(scored: Sequence[Scored]) -> list[User]:
    """Every model of a publication with runs enough."""
    groups: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for row in scored:
        groups[row.run.source, row.run.model].append(row)
    return [_user(rows) for rows in groups.values() if len(rows) >= 2 * RUNS]


def _user(rows: Sequence[Scored]) -> User:
    by_configuration = {row.run.job.configuration: row for row in rows}

    def price(job: Job) -> float:
        """As predicted with the publication left out, times what factors change."""
        row = by_configuration[job.configuration]
        return row.predicted_seconds * _modelled(job, row) / _modelled(row.run.job, row)

    before, after = [], []
    for draw in range(_DRAWS):
        chosen = random.Random(draw).sample(list(rows), 2 * RUNS)
        runs = [Row(job=row.run.job, seconds=row.run.measured_seconds) for row in chosen]
        factors = Factors(**fit_factors(runs[:RUNS], price).factors)
        before.append(statistics.median(errors(runs[RUNS:], SHIPPED, price)))
        after.append(statistics.median(errors(runs[RUNS:], factors, price)))
    first = rows[0].run
    return User(
        source=first.source,
        model=first.model,
        runs=len(rows),
        before=statistics.median(before),
        after=statistics.median(after),
    )


def _modelled(job: Job, row: Scored) -> float:
    return step_time(job).step_seconds


def main() -> None:
    print("| user | model | runs | error before | after 10 runs |\n|---|---|---|---|---|")
    for user in users(read_left_out()):
        print(f"| {user.source} | {user.model} | {user.runs} | {user.before:.1%} | {user.after:.1%} |")


if __name__ == "__main__":
    main()
