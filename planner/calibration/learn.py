"""Lessons of stored runs about one kind of hardware.

They become jobs that can be priced again; calibration factors are fitted to them, and proved on runs left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.files import canonical_json
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import HardwareKind, Measurement, RateMeasurement, calibration_record
from hardware_db.probe import Machine
from hardware_db.records import dataclass
from hardware_db.store.contract import Store
from hardware_db.store.transfer import is_shared
from planner.calibration.calibration import Calibration, calibration_of, hardware_kind
from planner.calibration.fit import TAILS, Fit, Noise, Prior, fit
from planner.calibration.spread import FACTOR_SPREADS, INSIDE, interval, kind_of, slopes
from planner.cluster.rates import rates_from_measurements
from planner.cluster.resolve import cluster_of_plan
from planner.cost.timing import step_time
from planner.models.facts_document import facts_of_plan
from planner.types.cluster import SHIPPED, Cluster, Factors
from planner.types.job import Job, counts_of, workload_of
from planner.types.plan_io import configuration_from_dict
from planner.vocabulary import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A completed run: what ran, and the seconds of its median step.

    `doubt` is a logarithmic spread to add to what is usual for such runs.
    """

    job: Job
    seconds: float
    doubt: float = 0.0

    @property
    def model(self) -> str:
        """Model that ran, by its name."""
        return self.job.facts.name


class Rebuilder:
    """Makes rows of measurements. `machine` is the one that is here: only its own clusters are probed anew."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self._store = store
        self._machine = machine
        self._here = fingerprint(machine).machine.key
        self._rates: dict[str, tuple[RateMeasurement, ...]] = {}

    def rows(self, measurements: Iterable[Measurement]) -> tuple[Row, ...]:
        """Return the rows of those that completed, have a step time, and can be priced again."""
        candidates = (
            self.row(measurement)
            for measurement in measurements
            if measurement.outcome == "completed" and measurement.measured.step_seconds
        )
        return tuple(row for row in candidates if row is not None)

    def row(self, measurement: Measurement) -> Row | None:
        """Return the row of a measurement.

        None if its model, what it trains or its hardware is unknown now, or if its ranks were unlike.
        """
        plan = measurement.plan
        try:
            configuration = configuration_from_dict(plan["plan"])
            if configuration.is_uneven or _section(plan, "cluster").get("groups"):
                return None  # its time says how fast a mixture of devices is, or ranks with unlike work
            workload = workload_of(_section(plan, "workload"), configuration)
            facts = facts_of_plan(_section(plan, "model"), workload.task)
            cluster = self._cluster(_section(plan, "cluster"), measurement, configuration.precision)
            counts = None if facts is None else counts_of(facts, workload)
        except (DsplanError, KeyError, TypeError, ValueError):
            return None
        if facts is None or counts is None or cluster is None or not measurement.measured.step_seconds:
            return None
        job = Job(
            facts=facts,
            counts=counts,
            workload=workload,
            cluster=cluster,
            configuration=configuration,
        )
        return Row(job=job, seconds=measurement.measured.step_seconds)

    def _cluster(self, section: Mapping[str, Any], measurement: Measurement, precision: Precision) -> Cluster | None:
        key = measurement.fingerprint.machine.key
        cluster = cluster_of_plan(section, self._machine if key == self._here else None)
        if cluster is None:
            return None
        if key not in self._rates:
            self._rates[key] = self._store.rates(key)
        if not self._rates[key]:
            return cluster
        rates = rates_from_measurements(self._rates[key], ranks=cluster.gpus_per_node, precision=precision)
        return replace(cluster, rates=rates)


def _section(plan: Mapping[str, object], name: str) -> Mapping[str, Any]:
    section = plan.get(name)
    if not isinstance(section, Mapping):
        raise KeyError(name)
    return section


FEWEST = 3
"""Different configurations that must have run before they correct the time model: one to fit to, one to try it on, and
one that tells chance from truth."""
_FOLDS = 5
_LEAVE_ONE_OUT = 12
_MODELS_TO_SPLIT_BY = 2
_FELT = 0.005
"""A factor that changes no step time by more than this share of its own change is not fitted."""

Seconds = Callable[[Job], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """The result of learning from `rows`. `calibration` is None if nothing may be stored; `reason` says why.

    `shipped` and `left_out` are the step times that the shipped constants predict for each row, and factors that were
    fitted to the rows of other parts; empty where nothing was fitted.
    """

    rows: int
    configurations: int
    split: str
    error_before: float | None = None
    error_after: float | None = None
    calibration: Calibration | None = None
    reason: str = ""
    shipped: tuple[float, ...] = ()
    left_out: tuple[float, ...] = ()


def learn(rows: Sequence[Row], seconds: Seconds | None = None) -> Lesson:
    """Return the calibration for rows of one kind of hardware, with its error on rows that it was not fitted to.

    The shipped constants were fitted to none of the rows, so their error over all rows is fair; that of the factors is
    over every row left out in turn. `seconds` prices a job, by default the time model.
    """
    price = seconds or _seconds
    parts, split = _parts(rows)
    configurations = len({row.job.configuration for row in rows})
    if configurations < FEWEST:
        why = f"{configurations} different configurations ran, and {FEWEST} are needed"
        return Lesson(rows=len(rows), configurations=configurations, split=split, reason=why)
    fitted = fit_factors(rows, price)
    shipped = [price(with_factors(row.job, SHIPPED)) for row in rows]
    apart = dict(pair for part in parts for pair in _left_out(rows, part, price, fitted))
    left_out = [apart[index] for index in range(len(rows))]
    before, after = _errors(shipped, rows), _errors(left_out, rows)
    lesson = Lesson(
        rows=len(rows),
        configurations=configurations,
        split=split,
        error_before=statistics.median(before),
        error_after=statistics.median(after),
        shipped=tuple(shipped),
        left_out=tuple(left_out),
    )
    # Both, so that neither a tie nor a few runs that got much worse pass for an improvement.
    if not all(mean(after) < mean(before) for mean in (statistics.median, statistics.fmean)):
        return replace(lesson, reason="the fitted factors predict runs that were left out no better than shipped ones")
    models = tuple(sorted({row.model for row in rows}))
    calibration = Calibration(
        factors=Factors(**fitted.factors),
        names=fitted.names,
        covariance=fitted.covariance,
        spread=fitted.spread * TAILS,
        rows=len(rows),
        models=models,
        error_before=statistics.median(before),
        error_after=statistics.median(after),
    )
    return replace(lesson, calibration=calibration)


def fit_factors(rows: Sequence[Row], seconds: Seconds | None = None, near: Fit | None = None) -> Fit:
    """Return the most probable factors, of those that the rows' step times feel at all.

    `near` is a fit to much the same rows.
    """
    price = seconds or _seconds
    felt = [slopes(row.job, price) for row in rows]
    priors = [
        Prior(name=name, spread=spread)
        for name, spread in FACTOR_SPREADS.items()
        if any(abs(slopes_of_row[name]) > _FELT for slopes_of_row in felt)
    ]
    names = [prior.name for prior in priors]
    scales = [math.hypot(INSIDE[kind_of(row.job)], row.doubt) for row in rows]

    def residuals(values: Sequence[float]) -> list[float]:
        factors = Factors(**{name: math.exp(value) for name, value in zip(names, values, strict=True)})
        return [
            math.log(row.seconds / price(with_factors(row.job, factors))) / scale
            for row, scale in zip(rows, scales, strict=True)
        ]

    start = None if near is None else [dict(zip(near.names, near.values, strict=True)).get(name, 0.0) for name in names]
    return fit(residuals, priors, Noise(spread=1 / TAILS), start)


def errors(rows: Sequence[Row], factors: Factors, seconds: Seconds | None = None) -> list[float]:
    """Return how far predictions with these factors are from what was measured, fractions of it."""
    price = seconds or _seconds
    return _errors([price(with_factors(row.job, factors)) for row in rows], rows)


def _errors(predicted: Sequence[float], rows: Sequence[Row]) -> list[float]:
    return [abs(seconds / row.seconds - 1) for seconds, row in zip(predicted, rows, strict=True)]


def with_factors(job: Job, factors: Factors) -> Job:
    """Return the job on a cluster of these factors."""
    return replace(job, cluster=replace(job.cluster, factors=factors))


def _left_out(rows: Sequence[Row], part: frozenset[int], price: Seconds, whole: Fit) -> list[tuple[int, float]]:
    """Return the predictions for the rows of one part, by their places, of factors fitted to all others."""
    rest = [row for index, row in enumerate(rows) if index not in part]
    factors = Factors(**fit_factors(rest, price, whole).factors)
    return [(index, price(with_factors(rows[index].job, factors))) for index in part]


def _parts(rows: Sequence[Row]) -> tuple[list[frozenset[int]], str]:
    """Return which rows are left out together, and the word for such a part.

    They are those of one model where there are several, else those of one configuration or of a fifth of them. Runs of
    one configuration are never on both sides.
    """
    models = _group(row.model for row in rows)
    if len(models) >= _MODELS_TO_SPLIT_BY:
        return models, "each model left out in turn"
    configurations = _group(row.job.configuration for row in rows)
    if len(configurations) <= _LEAVE_ONE_OUT:
        return configurations, "each configuration left out in turn"
    folds = [frozenset[int]().union(*configurations[start::_FOLDS]) for start in range(_FOLDS)]
    return folds, f"each {_FOLDS}th of the configurations left out in turn"


def _group(keys: Iterable[object]) -> list[frozenset[int]]:
    groups: dict[object, set[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, set()).add(index)
    return [frozenset(group) for group in groups.values()]


def _seconds(job: Job) -> float:
    return step_time(job).step_seconds


# Calibrating the database: each kind of hardware is learnt from its own runs, and what helped is kept.


MOST_ROWS = 300
"""The newest completed runs that are learnt from; more of them would change little and take long."""
OTHER_VERSIONS = 0.2
"""Logarithmic spread between versions of torch: one setting of fms-fsdp gained 20 to 28 % in a year (its README)."""
WITHDRAWN = {"withdrawn": "factors fitted to all runs so far predict those left out worse than the shipped ones"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """Calibration of one kind of hardware with its runs; `is_new` says that the database has something new of it."""

    hardware: HardwareKind
    lesson: Lesson
    is_new: bool
    rows: tuple[Row, ...]
    last_error: float | None = None
    """The median error of the calibration that was stored before, a fraction of the step time; None: there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """Calibrations of every kind of hardware, and how many runs could not be priced again."""

    kinds: tuple[Calibrated, ...]
    skipped: int


def refresh(store: Store, machine: Machine, *, only: HardwareKind | None = None, keep: bool = True) -> Refreshed:
    """Learns from the stored runs, of every kind of hardware or one `only`; `keep` stores what helped.

    Raises:
        DsplanError: the database cannot be read or written.
    """
    completed = [
        measurement
        for measurement in store.list(outcome="completed", limit=MOST_ROWS)
        if measurement.measured.step_seconds
    ]
    rebuilder = Rebuilder(store, machine)
    groups: dict[HardwareKind, list[tuple[Measurement, Row]]] = {}
    skipped = 0
    for measurement in completed:
        row = rebuilder.row(measurement)
        if row is None:
            skipped += 1
        elif only in (None, kind := hardware_kind(row.job.cluster)):
            groups.setdefault(kind, []).append((measurement, row))
    kinds = tuple(_calibrate(store, kind, _with_doubts(group), keep=keep) for kind, group in groups.items())
    return Refreshed(kinds=kinds, skipped=skipped)


def _calibrate(store: Store, kind: HardwareKind, rows: Sequence[Row], *, keep: bool) -> Calibrated:
    lesson = learn(rows)
    stored = calibration_of(store, rows[0].job.cluster)
    if lesson.calibration is not None:
        document = lesson.calibration.as_document()
        is_new = stored is None or canonical_json(stored.as_document()) != canonical_json(document)
    else:
        document = dict(WITHDRAWN)
        is_new = stored is not None and lesson.error_after is not None
    if keep and is_new:
        store.add_calibration(calibration_record(kind, document))
    last_error = None if stored is None else stored.error_after
    return Calibrated(hardware=kind, lesson=lesson, is_new=is_new, rows=tuple(rows), last_error=last_error)


def _with_doubts(group: Sequence[tuple[Measurement, Row]]) -> list[Row]:
    """Return the rows, newest first.

    Those of other versions of torch than the newest run's say less of the next, and so do strangers': their machines
    differ from this one as those of publications do from each other.
    """
    newest = group[0][0].fingerprint.versions.torch
    return [
        replace(
            row,
            doubt=math.hypot(
                OTHER_VERSIONS * (measurement.fingerprint.versions.torch != newest),
                FACTOR_SPREADS["compute"] * is_shared(measurement.source),
            ),
        )
        for measurement, row in group
    ]


# Predictions beside what was measured, for a picture.


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One run beside its predictions.

    Each is the seconds of a step and between which nine runs of ten should lie: with the shipped constants, and with
    factors that were not fitted to it (None where nothing was fitted).
    """

    row: Row
    shipped: tuple[float, float, float]
    left_out: tuple[float, float, float] | None


def checks(kind: Calibrated) -> tuple[Check, ...]:
    """Every run of a kind of hardware beside its predictions: lowest, expected, highest seconds of a step.

    The second interval is as wide as the calibration makes it that was fitted to all runs; without one it is that of
    the shipped constants.
    """
    lesson = kind.lesson
    shipped = lesson.shipped or tuple(_seconds(with_factors(row.job, SHIPPED)) for row in kind.rows)
    left_out = lesson.left_out or (None,) * len(kind.rows)
    checked = []
    for row, before, after in zip(kind.rows, shipped, left_out, strict=True):
        factors = SHIPPED if lesson.calibration is None else lesson.calibration.factors
        first = _interval(with_factors(row.job, SHIPPED), before, None)
        second = None if after is None else _interval(with_factors(row.job, factors), after, lesson.calibration)
        checked.append(Check(row=row, shipped=first, left_out=second))
    return tuple(checked)


def _interval(job: Job, seconds: float, calibration: Calibration | None) -> tuple[float, float, float]:
    low, high = interval(job, seconds, calibration)
    return low, seconds, high
