"""A month of a job on nodes that fail, by discrete events: failures, repair, spares, stragglers, preemption.

The events that change the job's course are simpy's. Between two of them it trains and saves as a clock does, so that
those hours cost one step of arithmetic, however many checkpoints they hold. Where more happens than `most_events`, the
month is simulated up to there, and goes on as it did in the second half of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import field
from random import Random
from typing import Any, Literal, get_args

import simpy

from hardware_db.records import dataclass

Kind = Literal["training", "slow", "lost", "saving", "restarting", "waiting", "preempted"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a job's time goes to: steps that stay; what they took longer for slow or missing nodes; steps that failures took
back; saving; from a failure to the next step; waiting for nodes; waiting while others have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A job on its nodes, and what happens to them. Times in seconds; events come at random moments."""

    nodes: int
    failures_per_node_second: float
    interval_seconds: float
    """Work between checkpoints, at full speed; infinite for none."""
    save_seconds: float
    """What training waits for each."""
    restart_seconds: float
    spares: int | None = None
    """Nodes beside those of the job; None: always one that is free."""
    repair_seconds: float = 0.0
    """Until a failed node is a spare one."""
    stragglers_per_node_second: float = 0.0
    slowdown: float = 1.0
    """Time of a step with a straggler over that without."""
    straggler_seconds: float = 0.0
    """Until it is noticed, and replaced after a save."""
    preemptions_per_second: float = 0.0
    """Of the whole job, with time to save before."""
    preempted_seconds: float = 0.0
    speed: Callable[[int], float] | None = None
    """Share of the full speed on fewer nodes, 0 where the job cannot run on them; None: it waits for nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Month:
    """Time of a simulated job, by what it went to."""

    seconds: dict[Kind, float]
    """They add up to the time that was simulated."""
    failures: int
    preemptions: int
    stragglers: int
    most_lost: float
    """Seconds of training that one failure took back, at the most."""
    simulated_seconds: float
    """Seconds until so much had happened that the rest counts as alike; all of them where less did."""
    progress: Sequence[tuple[float, float]] = field(default=(), compare=False)
    """Seconds from the beginning, and the seconds of work that are safe by then."""

    @property
    def duration(self) -> float:
        """Seconds of the month."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Progress over that of a job that nothing ever stops."""
        return self.seconds["training"] / self.duration


def simulate(fleet: Fleet, seconds: float, seed: int, most_events: float = math.inf) -> Month:
    """Return the first `seconds` of a job; the same for the same seed."""
    environment = simpy.Environment()
    job = _Job(environment, fleet, Random(seed))
    job.run(seconds, most_events / 2)
    half = job.spent()
    job.run(seconds, most_events)
    return job.result(seconds, half)


_Steps = Generator[simpy.Event, Any, Any]
_MANY_IDLE = 1000
"""Events from which on those that would meet a waiting job are not drawn one by one; a choice."""


class _Job:
    """The job's own process, and one for each kind of thing that happens to it.

    Those change what the job has (`nodes`, `spares`, `slow_nodes`, `held_until`) and interrupt it, so that it looks.
    """

    def __init__(self, environment: simpy.Environment, fleet: Fleet, random: Random) -> None:
        self._environment, self._fleet, self._random = environment, fleet, random
        self._seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self.events = 0
        """Events that met it at work until now."""
        self._counts = {"failures": 0, "preemptions": 0, "stragglers": 0}
        self._progress = [(0.0, 0.0)]
        self._nodes, self._spares = fleet.nodes, fleet.spares
        self._slow_nodes: set[object] = set()
        self._held_until, self._speed = 0.0, 1.0
        self._most_lost = 0.0
        self._doing: Kind = "training"
        self._since = 0.0
        self._work = self._extra = self._saved_for = 0.0
        """Of the checkpoint to come: work done at full speed, what it took longer, seconds of saving done."""
        self._process = environment.process(self._run())
        for rate, happen in (
            (fleet.failures_per_node_second * fleet.nodes, self._fail),
            (fleet.stragglers_per_node_second * fleet.nodes, self._slow_down),
            (fleet.preemptions_per_second, self._preempt),
        ):
            if rate > 0:
                environment.process(self._happen(rate, happen))

    def run(self, seconds: float, most_events: float) -> None:
        """Let the month go on until then, or until so much has happened since it began."""
        environment = self._environment
        # What the last event interrupts is seen to at the same moment.
        while environment.peek() < seconds and (self.events < most_events or environment.peek() == environment.now):
            environment.step()
        if self.events < most_events and environment.now < seconds:
            environment.run(until=seconds)

    def spent(self) -> dict[str, float]:
        """Return the seconds that went to each kind and the events of each, until now; work that is not safe counts."""
        self._account()
        spent: dict[str, float] = {**self._counts}
        spent.update(self._seconds.items())
        spent["training"] += self._work
        spent["slow"] += self._extra
        return spent

    def result(self, seconds: float, half: dict[str, float]) -> Month:
        """Return what the time went to; what is left of it goes on as it did since a half."""
        spent, now, safe = self.spent(), self._environment.now, self._seconds["training"]
        progress = [*self._progress, (now, safe)]
        if now < seconds:
            since = {name: max(0.0, each - half[name]) for name, each in spent.items()}
            more = (seconds - now) / math.fsum(since[kind] for kind in KINDS)
            spent = {name: each + more * since[name] for name, each in spent.items()}
            progress.append((seconds, safe + more * since["training"]))
        return Month(
            seconds={kind: spent[kind] for kind in KINDS},
            most_lost=self._most_lost,
            simulated_seconds=now,
            progress=tuple(progress),
            **{name: round(spent[name]) for name in self._counts},
        )

    # What happens to it.

    def _happen(self, rate: float, happen: Callable[[], None]) -> _Steps:
        while True:
            yield self._environment.timeout(self._next_after(rate))
            # Of the nodes that the rate is of some may be away, and those of a job that waits do nothing.
            if self._is_busy():
                self.events += 1
                if self._random.random() * self._fleet.nodes < self._nodes:
                    happen()

    def _is_busy(self) -> bool:
        return self._doing in ("training", "saving", "restarting")

    def _next_after(self, rate: float) -> float:
        """Return the seconds until a random event comes, past those that meet a job that waits."""
        after = self._random.expovariate(rate)
        if self._is_busy():
            return after
        until = self._environment.peek() - self._environment.now
        if rate * (until - after) > _MANY_IDLE and math.isfinite(until):
            return until + self._random.expovariate(rate)  # of random events none knows when the last one was
        while after < until < math.inf:
            after += self._random.expovariate(rate)
        return after

    def _fail(self) -> None:
        self._counts["failures"] += 1
        if self._random.random() * self._nodes < len(self._slow_nodes):
            self._slow_nodes.pop()
        self._lose_node()
        self._process.interrupt("failure")

    def _slow_down(self) -> None:
        self._counts["stragglers"] += 1
        node = object()
        self._account()
        self._slow_nodes.add(node)
        self._speed = self._speed_now()
        self._environment.process(self._notice(node))

    def _notice(self, node: object) -> _Steps:
        yield self._environment.timeout(self._fleet.straggler_seconds)
        if node in self._slow_nodes:
            self._account()
            self._slow_nodes.remove(node)
            self._lose_node()
            self._process.interrupt("stop")

    def _preempt(self) -> None:
        self._counts["preemptions"] += 1
        self._held_until = self._environment.now + self._fleet.preempted_seconds
        self._process.interrupt("stop")

    def _lose_node(self) -> None:
        self._nodes -= 1
        if self._spares is None:
            self._nodes += 1
        else:
            self._environment.process(self._repair())

    def _repair(self) -> _Steps:
        yield self._environment.timeout(self._fleet.repair_seconds)
        assert self._spares is not None
        self._spares += 1
        if self._doing == "waiting" or (self._doing in ("training", "saving") and self._nodes < self._fleet.nodes):
            self._process.interrupt("stop")

    # What it does.

    def _run(self) -> _Steps:
        is_restarted = False
        while True:
            if self._environment.now < self._held_until:
                is_restarted = False
                yield from self._spend("preempted", self._held_until - self._environment.now)
            elif not self._has_nodes():
                is_restarted = False
                yield from self._spend("waiting", math.inf)
            elif not is_restarted and self._environment.now > 0:
                is_restarted = (yield from self._spend("restarting", self._fleet.restart_seconds)) is None
            else:
                is_restarted = False
                yield from self._train_until_stopped()

    def _train_until_stopped(self) -> _Steps:
        """Train until a failure takes back what is not safe, or save where there is time to stop."""
        self._speed = self._speed_now()
        cause = yield from self._spend("training", math.inf)
        while cause == "stop":
            cause = yield from self._spend("saving", self._fleet.save_seconds)
        if cause == "failure":
            self._take_back()
        else:
            self._commit()

    def _has_nodes(self) -> bool:
        """Take spare nodes, and return whether the job can run on what it has then."""
        missing = self._fleet.nodes - self._nodes
        if self._spares is not None and missing:
            taken = min(missing, self._spares)
            self._nodes, self._spares = self._nodes + taken, self._spares - taken
        return self._speed_now() > 0

    def _speed_now(self) -> float:
        """Return the speed on the nodes that are here, 0 where they are too few."""
        fleet = self._fleet
        slowdown = fleet.slowdown if self._slow_nodes else 1.0
        if self._nodes == fleet.nodes:
            return 1 / slowdown
        return 0.0 if fleet.speed is None else fleet.speed(self._nodes) / slowdown

    def _spend(self, doing: Kind, seconds: float) -> _Steps:
        """Do something for so long, or until it is interrupted; return why it was, None where it was not."""
        self._doing, self._since = doing, self._environment.now
        try:
            if math.isinf(seconds):
                yield self._environment.event()
            else:
                yield self._environment.timeout(seconds)
        except simpy.Interrupt as interrupt:
            return interrupt.cause
        finally:
            self._account()
        return None

    def _account(self) -> None:
        """Add up what was done since this was last called."""
        passed, self._since = self._environment.now - self._since, self._environment.now
        if self._doing == "training":
            self._train(passed)
        else:
            self._seconds[self._doing] += passed

    def _train(self, seconds: float) -> None:
        """Train and save for so many seconds, checkpoint after checkpoint."""
        fleet, speed = self._fleet, self._speed
        seconds = self._one_checkpoint(seconds, speed)
        period = fleet.interval_seconds / speed + fleet.save_seconds
        if seconds <= 0 or math.isinf(period):
            return
        whole = math.floor(seconds / period)
        self._seconds["training"] += whole * fleet.interval_seconds
        self._seconds["slow"] += whole * fleet.interval_seconds * (1 / speed - 1)
        self._seconds["saving"] += whole * fleet.save_seconds
        self._one_checkpoint(max(0.0, seconds - whole * period), speed)

    def _one_checkpoint(self, seconds: float, speed: float) -> float:
        """Work at the checkpoint to come for so many seconds; return those that are left when it is complete."""
        fleet = self._fleet
        working = min(seconds, max(0.0, fleet.interval_seconds - self._work) / speed)
        self._work += working * speed
        self._extra += working * (1 - speed)
        seconds -= working
        if seconds <= 0:
            return 0.0
        saving = min(seconds, fleet.save_seconds - self._saved_for)
        self._seconds["saving"] += saving
        self._saved_for += saving
        if seconds <= saving and self._saved_for < fleet.save_seconds:
            return 0.0
        self._commit()
        return seconds - saving

    def _commit(self) -> None:
        self._seconds["training"] += self._work
        self._seconds["slow"] += self._extra
        self._work = self._extra = self._saved_for = 0.0
        self._progress.append((self._environment.now, self._seconds["training"]))

    def _take_back(self) -> None:
        """Lose what is not safe."""
        lost = self._work + self._extra
        self._seconds["lost"] += lost
        self._most_lost = max(self._most_lost, lost)
        self._work = self._extra = self._saved_for = 0.0
        self._progress.append((self._environment.now, self._seconds["training"]))
