"""PerformanceMonitor: timers of computing and communicating, compared over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strategies.errors import CannotRun
from strategies.mpi.wire import Wire

if TYPE_CHECKING:
    from mpi4py import MPI

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
        return sum(self.seconds) / len(self.seconds)

    @property
    def slowest_rank(self) -> int:
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceReport:
    """What all ranks measured. Each rank's `elapsed` is the sum of its computing, communicating and the rest, seconds.

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
    """Where this rank's time went up to `until`."""

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
        self._wire = Wire(comm)
        self._synchronize, self._clock = synchronize, clock
        self.reset()

    def start_timer(self, name: str, kind: Kind = "compute") -> None:
        """Start, or go on with, the timer of a name.

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
        """A timer around a block; it stops when the block fails, too."""
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
        """What all ranks measured up to now; running timers count up to now. A rank without a timer counts 0 for it."""
        now = self._now()
        own = {name: (timer.kind, _seconds(timer, now), timer.calls) for name, timer in self._timers.items()}
        everyone = self._wire.everyones((own, self._totals.until - self._totals.begin, dict(self._totals.spent)))
        kinds = {name: kind for timers, _, _ in everyone for name, (kind, _, _) in timers.items()}
        return PerformanceReport(
            timers=tuple(_row(name, kind, [timers for timers, _, _ in everyone]) for name, kind in kinds.items()),
            elapsed=tuple(elapsed for _, elapsed, _ in everyone),
            compute=tuple(spent["compute"] for _, _, spent in everyone),
            communication=tuple(spent["communication"] for _, _, spent in everyone),
        )

    def _now(self) -> float:
        """The time, after what passed since the last reading is put down to what was running meanwhile."""
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
    found = [timers.get(name, nothing) for timers in ranks]
    return TimerRow(
        name=name,
        kind=kind,
        seconds=tuple(seconds for _, seconds, _ in found),
        calls=tuple(calls for _, _, calls in found),
    )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
