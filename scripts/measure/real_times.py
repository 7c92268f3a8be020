"""Measured steps of CPU ranks beside what the planner says with the rates of `dsplan bench`, calibrated or not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hardware_db.measured_rows import SHIPPED, TimeRun, read_time_runs
from hardware_db.measurement import RateMeasurement
from hardware_db.microbench.grid import CPU, GPU, Scale, point_of, quick_points
from planner.calibration.learn import Row, fit_factors, learn, with_factors
from planner.cluster.rates import rates_from_measurements
from planner.cost.timing import step_time
from planner.search.estimate import price
from planner.types.cluster import SHIPPED as AS_SHIPPED
from planner.types.cluster import Factors
from planner.types.job import Job
from scripts.fit.time_scores import rank_correlation
from scripts.measure.memory_rows import question_of
from scripts.measure.rate_rows import read_rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """The rows of one kind of device: the grid of `times.py`, and what `dsplan bench` found there before."""

    times: Path
    rates: Path
    training: Path


def files_of(device: str) -> Files:
    """Return the shipped files of a device, named by its catalogue name up to the first hyphen."""
    name = device.split("-")[0].lower()
    return Files(
        times=SHIPPED / f"times_{name}.csv",
        rates=SHIPPED / f"rates_{name}.csv",
        training=SHIPPED / f"times_bench_{name}.csv",
    )


CPU_FILES = files_of("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A run and the step that was predicted for it."""

    run: TimeRun
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Signed: above 0 where the planner says more than was measured."""
        return self.predicted_seconds / self.run.step_seconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """One model and batch on one number of ranks, trained under every strategy."""

    entries: tuple[Timed, ...]

    @property
    def name(self) -> str:
        """The model, the batch, the precision and the ranks."""
        run = self.entries[0].run
        batch = f"{run.micro_batch_size} x {run.sequence_length}"
        if run.gradient_accumulation_steps > 1:
            batch += f" x {run.gradient_accumulation_steps}"
        return f"{run.model}, {batch}, {run.precision}, {run.world_size} ranks"

    @property
    def fastest(self) -> Timed:
        """The plan that ran fastest."""
        return min(self.entries, key=lambda entry: entry.run.step_seconds)

    @property
    def chosen(self) -> Timed:
        """The one that the planner puts first."""
        return min(self.entries, key=lambda entry: entry.predicted_seconds)

    @property
    def named_rightly(self) -> bool:
        """True if the plan that is put first was the fastest."""
        return self.chosen is self.fastest

    @property
    def loss(self) -> float:
        """Return how much longer the chosen strategy takes than the fastest."""
        return self.chosen.run.step_seconds / self.fastest.run.step_seconds - 1

    @property
    def order(self) -> float:
        """Rank correlation of predicted with measured step times."""
        return rank_correlation(
            [entry.predicted_seconds for entry in self.entries], [entry.run.step_seconds for entry in self.entries]
        )


class Bench:
    """All that a machine's benchmark gives the planner: rates, and factors that were learnt from its training runs."""

    def __init__(self, rates: Sequence[RateMeasurement], training: Iterable[TimeRun] = ()) -> None:
        self._rates = rates
        self._training = tuple(training)

    def job(self, run: TimeRun) -> Job:
        """Return a run as a job on the machine as it was measured."""
        request, configuration = question_of(run)
        rates = rates_from_measurements(self._rates, ranks=run.world_size, precision=request.workload.precision)
        return price(replace(request, cluster=replace(request.cluster, rates=rates)), configuration).job

    def row(self, run: TimeRun) -> Row:
        """Return a run to learn from."""
        return Row(job=self.job(run), seconds=run.step_seconds)

    @cached_property
    def factors(self) -> Factors:
        """Those that would be stored; the shipped ones where none would, or nothing was trained."""
        if not self._training:
            return AS_SHIPPED
        calibration = learn([self.row(run) for run in self._training]).calibration
        return AS_SHIPPED if calibration is None else calibration.factors

    def timed(self, run: TimeRun) -> Timed:
        """Return a run with its prediction."""
        return Timed(run=run, predicted_seconds=step_time(with_factors(self.job(run), self.factors)).step_seconds)


def learnt(rows: Sequence[Row]) -> Factors:
    """Return the factors that runs ask for."""
    return Factors(**fit_factors(rows).factors)


def shipped_bench(*, calibrated: bool) -> Bench:
    """Return the benchmark that was run before the shipped step times."""
    return Bench(read_rates(CPU_FILES.rates), read_time_runs(CPU_FILES.training) if calibrated else ())


def quick_bench(rates: Iterable[RateMeasurement]) -> Bench:
    """Return what a first plan knows: the few rates that are measured before a run where no benchmark was."""
    return Bench([rate for rate in rates if point_of(rate) in quick_points(_scale(rate), rate.ranks)])


def _scale(rate: RateMeasurement) -> Scale:
    return GPU if rate.fingerprint.machine.device else CPU


def contests(runs: Iterable[TimeRun], bench: Bench) -> list[Contest]:
    """Completed runs that differ in their strategy alone, with their predictions."""
    groups: dict[tuple[object, ...], list[Timed]] = {}
    for run in runs:
        if run.outcome == "completed":
            batch = (run.micro_batch_size, run.gradient_accumulation_steps, run.sequence_length, run.precision)
            groups.setdefault((run.model, run.world_size, *batch), []).append(bench.timed(run))
    return [Contest(entries=tuple(entries)) for entries in groups.values()]


def median_error(timed: Iterable[Timed]) -> float:
    """Of the absolute errors."""
    return statistics.median(abs(run.error) for run in timed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """Median errors on ten runs of one user's model.

    Before anything ran here, with the rates that the first run measured, and after ten other runs of it.
    """

    model: str
    before: float
    measured: float
    after: float


def learning(runs: Sequence[TimeRun], rates: Sequence[RateMeasurement]) -> Learning:
    """Learn from the first half of the runs of one model, and be tried on the second."""
    unknown, quick = Bench(()), quick_bench(rates)
    first, rest = runs[: len(runs) // 2], runs[len(runs) // 2 :]
    factors = learnt([quick.row(run) for run in first])
    return Learning(
        model=runs[0].model,
        before=_median_error([unknown.row(run) for run in rest], AS_SHIPPED),
        measured=_median_error([quick.row(run) for run in rest], AS_SHIPPED),
        after=_median_error([quick.row(run) for run in rest], factors),
    )


def by_batch(runs: Iterable[TimeRun]) -> dict[str, list[TimeRun]]:
    """Completed runs by model, one batch after another."""
    models: dict[str, list[TimeRun]] = {}
    for run in sorted(runs, key=lambda run: (run.micro_batch_size, run.sequence_length)):
        if run.outcome == "completed":
            models.setdefault(run.model, []).append(run)
    return models


def _median_error(rows: Iterable[Row], factors: Factors) -> float:
    return statistics.median(
        abs(step_time(with_factors(row.job, factors)).step_seconds / row.seconds - 1) for row in rows
    )
