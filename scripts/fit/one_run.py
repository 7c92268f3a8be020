"""Measures what one run of a strategy is worth for step times of the others, on real CPU ranks of `times_cpu.csv`.

    python -m scripts.fit.one_run

Of every setting of model, batch and ranks each strategy in turn is the one that ran; the others, which nothing was
learnt from, are predicted with it. *whole ratio* takes what the run took over its prediction for all of them, where it
was slower; *what is shared* is what `planner.calibration.experience` counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from hardware_db.measured_rows import read_time_runs
from planner.calibration.experience import Correction, Experience, KnownRun, family_of
from planner.cost.timing import step_time
from planner.types.job import Job
from scripts.fit.time_scores import percentile
from scripts.measure.rate_rows import read_rates
from scripts.measure.real_times import CPU_FILES, Bench, contests, quick_bench, shipped_bench

Error = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A strategy predicted after a run of another: the errors by way of counting that run, as |log| of predicted over
    measured, and whether the two are one family."""

    one_family: bool
    errors: Error


def machines() -> dict[str, Bench]:
    """By what is known of the machine before the run."""
    rates = read_rates(CPU_FILES.rates)
    return {
        "nothing": Bench(()),
        "a first run's rates": quick_bench(rates),
        "dsplan bench": shipped_bench(calibrated=False),
    }


def pairs(bench: Bench) -> Iterator[Pair]:
    """Every strategy after every other one of its setting."""
    for contest in contests(read_time_runs(CPU_FILES.times), bench):
        jobs = [(bench.job(entry.run), entry.run.step_seconds) for entry in contest.entries]
        for (ran, took), (other, takes) in permutations(jobs, 2):
            alike = family_of(ran.configuration) == family_of(other.configuration)
            yield Pair(one_family=alike, errors=_errors(ran, took, other, takes))


def _errors(ran: Job, took: float, other: Job, takes: float) -> Error:
    run = KnownRun(step_seconds=took, each=(took,), created_at="")
    predicted = step_time(other)
    ratio = max(1.0, took / step_time(ran).step_seconds)
    ways = {
        "nothing": predicted,
        "what is shared": Experience(known_runs={ran.configuration: run}).expected(other),
        "whole ratio": Correction(family=ratio).of(predicted),
    }
    return {name: abs(math.log(time.step_seconds / takes)) for name, time in ways.items()}


def report(by_machine: Mapping[str, Iterable[Pair]]) -> Iterator[str]:
    yield f"{'known of the machine':20} {'pairs':28} {'counted of the run':16} {'median':>6} {'mean':>6} {'p90':>6}"
    for machine, every in by_machine.items():
        listed = list(every)
        for kind, alike in (("other families", False), ("ZeRO-1 and ZeRO-2", True)):
            own = [pair.errors for pair in listed if pair.one_family == alike]
            for counted in own[0]:
                sizes = [errors[counted] for errors in own]
                cells = (statistics.median(sizes), statistics.fmean(sizes), percentile(sizes, 0.9))
                figures = " ".join(f"{cell:6.3f}" for cell in cells)
                yield f"{machine:20} {f'{kind} ({len(own)})':28} {counted:16} {figures}"


if __name__ == "__main__":
    print("\n".join(report({name: pairs(bench) for name, bench in machines().items()})))
