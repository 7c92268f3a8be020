"""The collectives of one communicator, timed, and the agreement of all ranks before any of them begins.

A collective that ranks enter with different arrays hangs or mixes up memory. So ranks first compare, in one message of
24 bytes, a digest of what each is about to send; what differs ends every rank with the same sentence.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from dsplan.mpi.arrays import Array
from strategies.errors import BackendMissing, CannotRun, DsplanError

if TYPE_CHECKING:
    from mpi4py import MPI


Value = TypeVar("Value")


def mpi() -> Any:
    """mpi4py's MPI module; its import initializes MPI.

    Raises:
        BackendMissing: mpi4py, or the MPI library that it loads, is not installed.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise BackendMissing("dsplan.mpi needs mpi4py; pip install 'dsplan[mpi]'") from None
    except (ImportError, RuntimeError) as problem:
        reason = str(problem).splitlines()[0]
        raise BackendMissing(f"mpi4py finds no MPI library ({reason}); install Open MPI or MPICH") from None
    return MPI


class Communicator:
    """One communicator. `comm` None means all ranks; `monitor` gets the time of every collective, in seconds.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: `comm` is no communicator among these ranks.
    """

    def __init__(self, comm: MPI.Comm | None, monitor: PerformanceMonitor | None = None) -> None:
        self._mpi = mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise CannotRun(f"comm is {comm!r}; give MPI.COMM_WORLD or a communicator split from it")
        self.comm: MPI.Comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._monitor = monitor

    def require_same(
        self, action: str, describe: Callable[[], Value], words: Callable[[Value], Sequence[str]]
    ) -> Value:
        """Return what `describe` returns if its words are the same on all ranks.

        Raises:
            DsplanError: `describe` fails here or on another rank, or ranks disagree; all ranks raise.
        """
        value, same = self.compare(describe, words)
        if not same:
            raise self.disagreement(action, self.all_gather_objects(list(words(value))))
        return value

    def compare(self, describe: Callable[[], Value], words: Callable[[Value], Sequence[str]]) -> tuple[Value, bool]:
        """Return what `describe` returns, and whether its words are the same on all ranks.

        Raises:
            DsplanError: `describe` fails on another rank. What it raises here is raised here.
        """
        value: Value | None = None
        problem: Exception | None = None
        digest = 0
        try:
            value = describe()
            digest = _digest(words(value))
        except Exception as found:  # raised again below, when the others know
            problem = found
        # The largest, the negative of the smallest, and whether anyone has failed.
        message = np.array([digest, -digest, problem is not None], dtype=np.int64)
        self._timed("agree", lambda: self.comm.Allreduce(self._mpi.IN_PLACE, message, op=self._mpi.MAX))
        if message[2]:
            self._raise_one(problem)
        return value, bool(message[0] == -message[1])  # type: ignore[return-value]

    def raise_together(self, problem: DsplanError | None) -> None:
        """Return when all ranks came without a problem.

        Raises:
            DsplanError: this rank's problem, or that of the first rank that has one.
        """

        def own() -> None:
            if problem is not None:
                raise problem

        self.compare(own, lambda _: ())

    def all_gather_objects(self, value: Value) -> list[Value]:
        """Return each rank's value, which is small and travels as a pickle."""
        values: list[Value] = self._timed("exchange", lambda: self.comm.allgather(value))
        return values

    def gather_objects(self, root: int, value: Value) -> list[Value] | None:
        """Return each rank's value on `root`, None elsewhere."""
        values: list[Value] | None = self._timed("exchange", lambda: self.comm.gather(value, root=root))
        return values

    def broadcast_object(self, root: int, value: Value | None) -> Value:
        """Return the value of `root`."""
        received: Value = self._timed("exchange", lambda: self.comm.bcast(value, root=root))
        return received

    def disagreement(self, action: str, words: Sequence[Sequence[str]]) -> CannotRun:
        """Return the first difference between ranks' words, in one line."""
        rank = next(rank for rank, other in enumerate(words) if list(other) != list(words[0]))
        other = words[rank]
        first = [word for word in words[0] if word not in set(other)]
        second = [word for word in other if word not in set(words[0])]
        return CannotRun(
            f"{action}: ranks differ: rank 0 has {first[0] if first else 'nothing more'}, rank {rank} has"
            f" {second[0] if second else 'nothing more'}; give every rank the same names, shapes and dtypes"
        )

    def all_reduce(self, buffer: Array) -> None:
        """All-reduce in place."""
        self._timed("all-reduce", lambda: self.comm.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM))

    def reduce_scatter(self, buffer: Array, counts: Sequence[int]) -> Array:
        """Reduce-scatter: `buffer` holds `counts[r]` elements for every rank r; the sum of this rank's is returned."""
        part = np.empty(counts[self.rank], dtype=buffer.dtype)
        self._timed("reduce-scatter", lambda: self.comm.Reduce_scatter(buffer, part, list(counts), op=self._mpi.SUM))
        return part

    def all_gather(self, part: Array, counts: Sequence[int]) -> Array:
        """All-gather: every rank's part, one after the other; `counts[r]` elements are rank r's."""
        whole = np.empty(sum(counts), dtype=part.dtype)
        kind, size = self._mpi.BYTE, part.dtype.itemsize
        sizes = [count * size for count in counts]
        self._timed(
            "all-gather",
            lambda: self.comm.Allgatherv([_bytes(part), sizes[self.rank], kind], [_bytes(whole), sizes, kind]),
        )
        return whole

    def gather(self, root: int, part: Array) -> Array | None:
        """Gather parts of one size on `root`: [ranks, elements] there, None elsewhere."""
        whole = np.empty((self.size, part.size), dtype=part.dtype) if self.rank == root else None
        into = None if whole is None else [_bytes(whole), self._mpi.BYTE]
        self._timed("gather", lambda: self.comm.Gather([_bytes(part), self._mpi.BYTE], into, root=root))
        return whole

    def broadcast(self, root: int, buffer: Array) -> None:
        """Broadcast in place."""
        self._timed("broadcast", lambda: self.comm.Bcast([_bytes(buffer), self._mpi.BYTE], root=root))

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        if self._monitor is None:
            return call()
        with self._monitor.timer(name, "communication"):
            return call()

    def _raise_one(self, problem: Exception | None) -> None:
        expected = problem is None or isinstance(problem, DsplanError)
        problems = self.all_gather_objects(problem if expected else CannotRun(f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        rank, error = next((rank, raised) for rank, raised in enumerate(problems) if raised is not None)
        error.args = (f"rank {rank}: {error}",)
        raise error


def _digest(words: Sequence[str]) -> int:
    """Return a number of 62 bits, so that it and its negative fit a signed 64-bit integer."""
    text = "\n".join(words).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


def _bytes(array: Array) -> Array:
    """Return a contiguous array's bytes, so that dtypes that MPI has not travel too."""
    return array.reshape(-1).view(np.uint8)


Kind = Literal["compute", "communication"]
_KINDS = ("compute", "communication")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerRow:
    """One timer: seconds in total and how often it ran, per rank."""

    name: str
    kind: str
    seconds: tuple[float, ...]
    calls: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Seconds, averaged over ranks."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def slowest_rank(self) -> int:
        """The rank with the most seconds."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceReport:
    """Measurements of all ranks; a rank's `elapsed` is its computing, communicating and the rest, seconds.

    Time counts as communication while a communication timer runs, whatever else runs around it; else as compute while
    a compute timer runs.
    """

    timers: tuple[TimerRow, ...]
    elapsed: tuple[float, ...]
    compute: tuple[float, ...]
    communication: tuple[float, ...]

    def __str__(self) -> str:
        lines = [f"{'timer':<24} {'kind':<14} {'calls':>7} {'mean s':>10} {'min s':>10} {'max s':>10}  slowest"]
        for row in self.timers:
            least, most = min(row.seconds), max(row.seconds)
            lines.append(
                f"{row.name:<24} {row.kind:<14} {max(row.calls):>7} {row.mean:>10.4f} {least:>10.4f} {most:>10.4f}"
                f"  rank {row.slowest_rank}"
            )
        for rank, whole in enumerate(self.elapsed):
            lines.append(
                f"rank {rank}: {whole:.4f} s, computing {_percent(self.compute[rank], whole)}, communicating"
                f" {_percent(self.communication[rank], whole)}"
            )
        return "\n".join(lines)


@dataclass(kw_only=True, slots=True)
class _Timer:
    kind: Kind
    seconds: float = 0.0
    calls: int = 0
    since: float | None = None


@dataclass(kw_only=True, slots=True)
class _Totals:
    """Time of this rank by activity, up to `until`."""

    begin: float
    until: float
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_KINDS, "other"), 0.0))


class PerformanceMonitor:
    """Timers of this rank; `get_performance_metrics` and `report` compare them over the ranks, who call them together.

        monitor = PerformanceMonitor(MPI.COMM_WORLD)
        monitor.start_timer("forward_pass")
        outputs = model.forward(inputs)
        monitor.stop_timer("forward_pass")
        print(monitor.get_performance_metrics()["forward_pass"])

    `GradientManager`, `ZeROOptimizer` and `CheckpointManager` time their collectives with the monitor that they are
    given. Timers of different names may overlap. A monitor belongs to one thread.

    Args:
        comm: the ranks; None: all.
        synchronize: called before each reading of the clock, as `torch.cuda.synchronize`, where a device works behind
            the program's back.
        clock: seconds, never going back.

    Raises:
        BackendMissing: there is no MPI.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        synchronize: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._communicator = Communicator(comm)
        self._synchronize, self._clock = synchronize, clock
        self.reset()

    def start_timer(self, name: str, kind: Kind = "compute") -> None:
        """Start, or resume, the timer of a name.

        Raises:
            CannotRun: it runs already, or is of another kind.
        """
        if kind not in _KINDS:
            raise CannotRun(f"timer {name!r}: kind is {kind!r}; it is 'compute' or 'communication'")
        timer = self._timers.setdefault(name, _Timer(kind=kind))
        if timer.kind != kind:
            raise CannotRun(f"timer {name!r} is of {timer.kind}; give the one of {kind} another name")
        if timer.since is not None:
            raise CannotRun(f"timer {name!r} runs already; stop it first")
        timer.since = self._now()

    def stop_timer(self, name: str) -> float:
        """Stop a timer; the seconds since its start.

        Raises:
            CannotRun: it does not run.
        """
        timer = self._timers.get(name)
        if timer is None or timer.since is None:
            raise CannotRun(f"timer {name!r} does not run; start it first")
        now = self._now()
        seconds, timer.since = now - timer.since, None
        timer.seconds += seconds
        timer.calls += 1
        return seconds

    @contextmanager
    def timer(self, name: str, kind: Kind = "compute") -> Iterator[None]:
        """Return a timer around a block; it stops when the block fails, too."""
        self.start_timer(name, kind)
        try:
            yield
        finally:
            self.stop_timer(name)

    def reset(self) -> None:
        """Forget everything measured, and start the elapsed time anew; running timers are gone."""
        self._timers: dict[str, _Timer] = {}
        now = self._clock()
        self._totals = _Totals(begin=now, until=now)

    def get_performance_metrics(self) -> Mapping[str, float]:
        """Seconds per timer, and `compute`, `communication` and `elapsed` seconds, as means over the ranks.

        `communication_fraction` is communication as a part of elapsed. A timer of one of these names is left out.
        """
        report = self.report()
        elapsed, communication = _mean(report.elapsed), _mean(report.communication)
        return {row.name: row.mean for row in report.timers} | {
            "compute": _mean(report.compute),
            "communication": communication,
            "elapsed": elapsed,
            "communication_fraction": communication / elapsed if elapsed else 0.0,
        }

    def report(self) -> PerformanceReport:
        """Return what all ranks measured up to now; running timers count up to now.

        A rank without a timer counts 0 for it.
        """
        now = self._now()
        own = {name: (timer.kind, _seconds(timer, now), timer.calls) for name, timer in self._timers.items()}
        everyone = self._communicator.all_gather_objects(
            (own, self._totals.until - self._totals.begin, dict(self._totals.spent))
        )
        kinds = {name: kind for timers, _, _ in everyone for name, (kind, _, _) in timers.items()}
        return PerformanceReport(
            timers=tuple(_row(name, kind, [timers for timers, _, _ in everyone]) for name, kind in kinds.items()),
            elapsed=tuple(elapsed for _, elapsed, _ in everyone),
            compute=tuple(spent["compute"] for _, _, spent in everyone),
            communication=tuple(spent["communication"] for _, _, spent in everyone),
        )

    def _now(self) -> float:
        """Return the time, after what passed since the last reading is put down to what was running meanwhile."""
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        running = {timer.kind for timer in self._timers.values() if timer.since is not None}
        kind = next((kind for kind in reversed(_KINDS) if kind in running), "other")
        self._totals.spent[kind] += now - self._totals.until
        self._totals.until = now
        return now


def _seconds(timer: _Timer, now: float) -> float:
    return timer.seconds + (0.0 if timer.since is None else now - timer.since)


def _row(name: str, kind: str, ranks: list[dict[str, tuple[Kind, float, int]]]) -> TimerRow:
    nothing = (kind, 0.0, 0)
    totals = [timers.get(name, nothing) for timers in ranks]
    return TimerRow(
        name=name,
        kind=kind,
        seconds=tuple(seconds for _, seconds, _ in totals),
        calls=tuple(calls for _, _, calls in totals),
    )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
