"""A benchmark from start to end: measure what is missing, store each result as soon as it is there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement, Outcome, RateMeasurement, measure_run, plan_key
from hardware_db.microbench.point import Point
from hardware_db.microbench.rate import Refusal, as_measurement, point_of
from hardware_db.probe import Machine
from hardware_db.spawn import RankError
from hardware_db.store import Store
from planner.estimate import estimate
from planner.machine_rates import rates_from_measurements
from planner.plan import Plan
from planner.plan_io import plan_to_dict
from planner.resolve_cluster import probed_cluster
from strategies.bench.case import TrainingCase
from strategies.bench.events import Begun, Event, Found, Measured, Refused, Started, TimeIsUp, Waiting, Work
from strategies.bench.on_rank import Trainee, measure_point, train_trainee
from strategies.bench.plan import BenchPlan
from strategies.bench.pools import Pools, threads_of
from strategies.bench.training_cases import request_of
from strategies.bench.turn import Turn
from strategies.launch.record import measured_of
from strategies.metrics import read_metrics, summarise

SOURCE = "bench"
_SETTLED: tuple[Outcome, ...] = ("completed", "out_of_memory")
"""Outcomes of a training run that another one would only repeat."""
_TRAINING_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a benchmark goes: whether to measure anew what is stored, and the seconds after which nothing new is
    begun, None for no limit."""

    again: bool = False
    seconds: float | None = None


class BenchSession:
    """A benchmark of this machine. Iterate `events()` to its end.

    Every result is in the database before its event is told, so a benchmark that is killed loses only the piece of work
    it was at, and the next one goes on from there.
    """

    def __init__(self, plan: BenchPlan, machine: Machine, store: Store, limits: Limits) -> None:
        self._plan = plan
        self._machine = machine
        self._store = store
        self._limits = limits
        self._fingerprint = fingerprint(machine)
        self._gpu = not probed_cluster(machine).device.is_cpu
        self._left: list[Work] = []

    def events(self) -> Generator[Event, None, None]:
        """Measure, telling what happens."""
        wanted: list[Work] = [*self._plan.points, *self._plan.training]
        deadline = None if self._limits.seconds is None else time.monotonic() + self._limits.seconds
        self._left = missing = wanted if self._limits.again else self._missing(wanted)
        yield Begun(total=len(wanted), stored=len(wanted) - len(missing))
        with Pools(gpu=self._gpu) as pools:
            for position, work in enumerate(missing):
                if deadline is not None and time.monotonic() > deadline:
                    yield TimeIsUp(left=sum(item in self._left for item in missing[position:]))
                    return
                yield Started(work=work)
                yield from self._done(work, pools)

    def _done(self, work: Work, pools: Pools) -> Iterator[Event]:
        """Measure one piece of work while no other benchmark does."""
        with Turn() as turn:
            if not turn.take(wait=False):
                yield Waiting()
                turn.take(wait=True)
            if turn.others_were_here() and not self._limits.again:
                self._left = self._missing(self._left)
            if work not in self._left:
                yield Found(work=work)
                return
            try:
                record = self._rate(work, pools) if isinstance(work, Point) else self._run(work, pools)
            except _Refused as problem:
                yield Refused(work=work, reason=str(problem))
                return
            self._store.add(record)
        yield Measured(work=work, record=record)

    def _missing(self, wanted: list[Work]) -> list[Work]:
        """Those of `wanted` that this machine with these versions has no result of."""
        known = {point_of(rate) for rate in self._store.rates(self._fingerprint.key)}
        return [work for work in wanted if (work not in known if isinstance(work, Point) else not self._has_run(work))]

    def _has_run(self, case: TrainingCase) -> bool:
        found = self._store.find(plan_key(plan_to_dict(self._planned(case))), self._fingerprint.key)
        return found is not None and found.outcome in _SETTLED

    def _rate(self, point: Point, pools: Pools) -> RateMeasurement:
        try:
            answers = pools.run(point.ranks, measure_point, point, threads_of(point.ranks))
        except RankError as problem:
            raise _Refused(_first_line(problem)) from problem
        refusal = next((answer for answer in answers if isinstance(answer, Refusal)), None)
        if refusal is not None:
            raise _Refused(refusal.reason)
        return as_measurement(answers[0], self._fingerprint, SOURCE)

    def _run(self, case: TrainingCase, pools: Pools) -> Measurement:
        plan = self._planned(case)
        outcome: Outcome = "completed"
        with tempfile.TemporaryDirectory(prefix="dsplan-bench-") as folder:
            trainee = Trainee(
                model=case.model,
                config=case.config,
                task=case.task,
                plan=plan_to_dict(plan),
                run_directory=folder,
                seconds=_TRAINING_SECONDS,
                threads=threads_of(case.ranks),
            )
            try:
                pools.run(case.ranks, train_trainee, trainee, deepspeed=case.needs_deepspeed)
            except RankError as problem:
                if "out of memory" not in str(problem):
                    raise _Refused(_first_line(problem)) from problem
                outcome = "out_of_memory"
            found = summarise(read_metrics(Path(folder), case.ranks))
        # The ranks also hold what earlier runs left in them, so what they take of the host is not this run's.
        measured = replace(measured_of(found), host_bytes=None)
        return measure_run(plan_to_dict(plan), self._fingerprint, outcome=outcome, measured=measured, source=SOURCE)

    def _planned(self, case: TrainingCase) -> Plan:
        """The case as a plan for this machine, with its rates as far as they are measured."""
        cluster = probed_cluster(self._machine, ranks=case.ranks)
        rates = rates_from_measurements(
            self._store.rates(self._fingerprint.key), ranks=case.ranks, precision=case.configuration.precision
        )
        return estimate(request_of(case, replace(cluster, rates=rates)), case.configuration)


class _Refused(Exception):
    """A piece of work that cannot be measured here; the message is one line."""


def _first_line(problem: RankError) -> str:
    return str(problem).splitlines()[0][:300]
