"""A benchmark from start to end: measure what is missing, store each result as soon as it is there."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

from dsplan.diagnostics.bench.cases import Trainee, TrainingCase, request_of
from dsplan.diagnostics.bench.plan import BenchPlan
from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from hardware_db.errors import BrokenFile
from hardware_db.files import HOME, data_dir
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import Measurement, Outcome, RateMeasurement, measure_run, plan_key
from hardware_db.microbench.grid import Point, Rate, Refusal, as_measurement, point_of
from hardware_db.probe import Machine
from hardware_db.probe.cgroup import usable_cores
from hardware_db.store import Store
from planner.cluster.rates import rates_from_measurements
from planner.cluster.resolve import probed_cluster
from planner.search.estimate import estimate
from planner.types.plan import Plan
from planner.types.plan_io import plan_to_dict
from strategies.telemetry.metrics import measured_of, read_metrics, summarise
from strategies.variables import QUIET

Work: TypeAlias = Point | TrainingCase


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """Counts of the work that is wanted."""

    total: int
    stored: int
    """How many of them are in the database already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A piece of work is next."""

    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Another benchmark is measuring just now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredElsewhere:
    """Another benchmark measured it in the meantime."""

    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """It is measured and in the database."""

    work: Work
    record: RateMeasurement | Measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """It cannot be measured here; the next call will try again."""

    work: Work
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeIsUp:
    """The minutes are over, and `left` pieces of work wait for the next call."""

    left: int


Event: TypeAlias = Begun | Started | Waiting | MeasuredElsewhere | Measured | Refused | TimeIsUp


# The rank pool of a benchmark, reused as long as the next piece of work fits it.
_CALL_SECONDS = 300.0


class Pools:
    """A context with a pool of ranks for each number and kind: DeepSpeed leaves state behind, so it gets its own."""

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._kind: tuple[int, bool] | None = None
        self._pool: RankPool | None = None

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, deepspeed: bool = False) -> list[Any]:
        """Run a function on every rank, and return what each of them returned.

        Raises:
            RankError: a rank raised, died or did not answer; the next call starts new ones.
        """
        if self._pool is None or self._kind != (ranks, deepspeed):
            self.close()
            # Without a GPU DeepSpeed must be told that there is none.
            variables = {} if self._gpu else {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
            variables[QUIET] = "1"
            backend = "nccl" if self._gpu else "gloo"
            self._kind = (ranks, deepspeed)
            self._pool = RankPool(ranks, backend=backend, timeout_seconds=_CALL_SECONDS, variables=variables)
        try:
            return self._pool.run(function, *arguments)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def threads_of(ranks: int) -> int:
    """Return the threads that each of so many ranks computes in, as under `dsplan run`."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else max(1, usable_cores() // ranks)


# One benchmark measures at a time: two at once would each measure the other.
LOCK_NAME = "bench.lock"


class Turn:
    """The turn of a process among all benchmarks that store into the same database. Leaving the context ends it.

    The lock is the operating system's, which releases it however its holder ends. Where there is none (Windows),
    benchmarks do not wait for each other.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def __enter__(self) -> Turn:
        path = data_dir() / LOCK_NAME
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            remedy = f"set {HOME} to a directory you can write to"
            raise BrokenFile(path, f"cannot be written ({error.strerror})", remedy) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, *, wait: bool) -> bool:
        """Return whether it is this process's turn now; with `wait`, after however long the others take."""
        try:
            import fcntl
        except ImportError:
            return True
        try:
            fcntl.flock(self._open.fileno(), fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def others_were_here(self) -> bool:
        """Return whether the last turn was another process's; from now on it is this one's."""
        me = str(os.getpid())
        self._open.seek(0)
        last = self._open.read()
        self._open.truncate(0)
        self._open.write(me)
        self._open.flush()
        return last != me

    @property
    def _open(self) -> IO[str]:
        if self._file is None:
            raise RuntimeError("the turn was not entered")
        return self._file


SOURCE = "bench"
_SETTLED: tuple[Outcome, ...] = ("completed", "out_of_memory")
"""Outcomes of a training run that another one would only repeat."""
_TRAINING_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a benchmark."""

    again: bool = False
    """Whether to measure anew what is stored."""
    seconds: float | None = None
    """After which nothing new is begun; None for no limit."""


class BenchSession:
    """A benchmark of this machine. Iterate `events()` to its end.

    Every result is in the database before its event is reported, so a benchmark that is killed loses only the piece
    of work it was at, and the next one resumes from there.
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
        """Measure, reporting what happens."""
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
                yield from self._measure(work, pools)

    def _measure(self, work: Work, pools: Pools) -> Iterator[Event]:
        """Measure one piece of work while no other benchmark does."""
        with Turn() as turn:
            if not turn.take(wait=False):
                yield Waiting()
                turn.take(wait=True)
            if turn.others_were_here() and not self._limits.again:
                self._left = self._missing(self._left)
            if work not in self._left:
                yield MeasuredElsewhere(work=work)
                return
            try:
                record = self._rate(work, pools) if isinstance(work, Point) else self._run(work, pools)
            except _Refused as problem:
                yield Refused(work=work, reason=str(problem))
                return
            self._store.add(record)
        yield Measured(work=work, record=record)

    def _missing(self, wanted: list[Work]) -> list[Work]:
        """List those of `wanted` of which this machine with these versions has no result."""
        stored = {point_of(rate) for rate in self._store.rates(self._fingerprint.key)}
        return [work for work in wanted if (work not in stored if isinstance(work, Point) else not self._has_run(work))]

    def _has_run(self, case: TrainingCase) -> bool:
        record = self._store.find(plan_key(plan_to_dict(self._make_plan(case))), self._fingerprint.key)
        return record is not None and record.outcome in _SETTLED

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
        plan = self._make_plan(case)
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
            summary = summarise(read_metrics(Path(folder), case.ranks))
        # The ranks also hold what earlier runs left in them, so what they take of the host is not this run's.
        measured = replace(measured_of(summary), host_bytes=None)
        return measure_run(plan_to_dict(plan), self._fingerprint, outcome=outcome, measured=measured, source=SOURCE)

    def _make_plan(self, case: TrainingCase) -> Plan:
        """Return the case as a plan for this machine, with its rates as far as they are measured."""
        cluster = probed_cluster(self._machine, ranks=case.ranks)
        rates = rates_from_measurements(
            self._store.rates(self._fingerprint.key), ranks=case.ranks, precision=case.configuration.precision
        )
        return estimate(request_of(case, replace(cluster, rates=rates)), case.configuration)


class _Refused(Exception):
    """A piece of work that cannot be measured here; the message is one line."""


def _first_line(problem: RankError) -> str:
    return str(problem).splitlines()[0][:300]


# The work of the ranks. They import torch; the process that draws the progress does not.


def measure_point(point: Point, threads: int) -> Rate | Refusal:
    """Measure a point on every rank of the group; see `hardware_db.microbench.runner`."""
    from hardware_db.microbench.runner import measure_on_rank

    return measure_on_rank(point, threads)


def train_trainee(trainee: Trainee) -> None:
    """Train on every rank of the group; see `dsplan.diagnostics.bench.training`."""
    from dsplan.diagnostics.bench.training import train

    train(trainee)
