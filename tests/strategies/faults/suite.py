"""A run with several faults of one kind, and what is asked of it afterwards."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import runpy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.strategies.faults import moments
from tests.strategies.faults.faulty_run import SCRIPT, FaultyRun
from tests.strategies.faults.ledger import (
    Start,
    Step,
    lineage,
    misused_samples,
    progress,
    read_starts,
    worst_difference,
)
from tests.strategies.faults.moments import Inflict, Moment, When

Reference = Callable[[Mapping[str, Any]], list[Step]]
"""The steps of a run with some settings to which nothing happens."""
FIGURES = "FAULT_FIGURES"
"""Names a file to which every run's figures are appended, as a line of JSON."""
OPTIONS = ("--checkpoint-steps", "3", "--retries", "5", "--hang-minutes", "0.15")
LATE_CHECKPOINTS = 3
"""At least half of a run's faults come after so many checkpoints."""
LATE_STEP = 13
"""By this step the third checkpoint is complete for certain: the fourth, of step 12, has waited for it."""
STARTING = 0.25
"""Share of the faults that come while processes start and load, where the kind allows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan that the script trains under; empty: what the planner chooses."""

    strategy: str | None = None
    backend: str | None = None

    @property
    def name(self) -> str:
        if self.strategy is None:
            return "the planner's choice"
        return self.strategy if self.backend == "torch" else f"{self.backend} {self.strategy}"


TORCH = (Plan(strategy="ddp", backend="torch"), Plan(strategy="fsdp", backend="torch"))
NATIVE = tuple(Plan(strategy=f"zero{stage}", backend="native") for stage in (1, 2, 3))
DEEPSPEED = tuple(Plan(strategy=f"zero{stage}", backend="deepspeed") for stage in (1, 2, 3))
PLANS = (*TORCH, *NATIVE, *DEEPSPEED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A kind of fault: `inflict` does it from outside, `inside` names what the script does to itself.

    `ending` is the journal's word for how an attempt that met it ended, or None if the attempt continues, and
    `early_ending` what it may be while the ranks start. `per_run` of them happen to a run of the whole suite, under
    each of `plans`. One that `needs_checkpoints` waits for some to be written, so it comes neither at a start nor at
    the end.
    """

    name: str
    ending: str | None
    early_ending: str | None = None
    inflict: Inflict | None = None
    inside: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    small_disk: bool = False
    needs_checkpoints: bool = False
    per_run: int = 4
    plans: tuple[Plan, ...] = PLANS


def _out_of_memory(name: str, inside: str) -> Fault:
    """Batches large enough for a plan that saves memory, and no dropout, which would draw other numbers under it."""
    settings = {"dropout": 0, "batch": 512, "samples": 2560}
    plans = (Plan(), *TORCH, *NATIVE[1:], *DEEPSPEED[1:])
    return Fault(name=name, ending="out_of_memory", inside=inside, settings=settings, per_run=2, plans=plans)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="kill -9 of a rank", ending="killed", inflict=moments.kill_a_rank),
        Fault(
            name="kill -9 of a rank that saves",
            ending="killed",
            inflict=moments.kill_a_rank_that_saves,
            settings={"width": 512},
            needs_checkpoints=True,
        ),
        Fault(name="kill -9 of the agent", ending="killed", inflict=moments.kill_the_agent),
        Fault(name="kill -9 of dsplan run", ending=None, inflict=moments.kill_the_command),
        Fault(name="SIGTERM", ending="preempted", inflict=moments.preempt),
        # Of ranks that have not met yet, the one that came waits, gives up, and the agent kills the other.
        Fault(name="SIGSTOP of a rank", ending="hung", early_ending="killed", inflict=moments.stop_a_rank),
        Fault(name="a rank sleeps", ending="hung", inside="sleep", per_run=3),
        Fault(name="a rank holds the lock", ending="hung", inside="hold", per_run=3),
        # Its connection to the data is lost, which another attempt may help; a bug that comes again ends a run.
        Fault(name="a rank loses a connection of its own", ending="lost", inside="raise", per_run=3),
        _out_of_memory("out of memory", "out_of_memory"),
        _out_of_memory("out of host memory", "host_memory"),
        Fault(
            name="full disk",
            ending=None,
            inflict=moments.fill_the_disk,
            settings={"pause": 0.25},
            small_disk=True,
            needs_checkpoints=True,
            per_run=2,
        ),
        Fault(
            name="full disk, then kill -9 of a rank",
            ending="killed",
            inflict=moments.fill_the_disk_and_kill,
            settings={"pause": 0.25},
            small_disk=True,
            needs_checkpoints=True,
            per_run=2,
        ),
        Fault(
            name="damaged checkpoint, then kill -9 of a rank",
            ending="killed",
            inflict=moments.damage_a_checkpoint,
            needs_checkpoints=True,
            per_run=3,
        ),
        Fault(
            name="damaged list of checkpoints, then kill -9 of a rank",
            ending="killed",
            inflict=moments.damage_the_list,
            needs_checkpoints=True,
            per_run=3,
        ),
    )
}


DEFAULTS = {"steps": 30, "samples": 80, "batch": 8, "width": 128, "dropout": 0.1, "pause": 0.05}


def settings_of(fault: Fault, plan: Plan) -> dict[str, Any]:
    """Return what the script of a run is told, where the fault can happen on this machine."""
    if fault.small_disk and os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    return {**DEFAULTS, "strategy": plan.strategy, "backend": plan.backend, **fault.settings}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of what a run came to."""

    fault: str
    seed: int
    strategy: str
    planned: int  # how many faults were to happen
    hits: int  # how many did what they should
    steps: list[int]  # the steps that were being made when they did
    checkpoints: list[int]  # how many steps had been saved then
    finished: bool
    plans: int
    worst_difference: float  # of a step's loss from the uninterrupted run's
    misused_samples: int
    endings: list[str]
    blamed: list[int | None]  # the ranks that the journal names for the endings
    hurt: list[int | None]  # those to which something was done
    unmet: list[str]  # what should have followed a fault and did not
    seconds_lost: list[float]  # by attempt that resumed: from the last sign of the one before to a new step
    steps_repeated: list[int]  # by attempt that resumed: how many steps that had been begun were made again
    full_disk_alerts: int
    left_running: list[str]
    wall_seconds: float

    @property
    def late(self) -> int:
        """Return how many faults came after the third checkpoint."""
        return sum(count >= LATE_CHECKPOINTS for count in self.checkpoints)

    def keep(self) -> None:
        """Append to the file that `FAULT_FIGURES` names."""
        if path := os.environ.get(FIGURES):
            with Path(path).open("a") as file:
                file.write(json.dumps({**asdict(self), "late": self.late}) + "\n")


def uninterrupted(directory: Path, settings: Mapping[str, Any], ranks: RankPool) -> list[Step]:
    """The steps of a run to which nothing happens; by ranks that are up where they train alike without `dsplan run`."""
    if settings["backend"] in ("torch", "native"):
        ranks.run(train_alone, str(directory), settings)
        return lineage(read_starts(directory))
    with FaultyRun(directory, settings, options=OPTIONS) as run:
        run.start()
        assert run.wait() == 0, run.out
        (start,) = run.starts()
        return lineage([start])


def train_alone(directory: str, settings: Mapping[str, Any]) -> None:
    """The script on a rank, with its ledger in a directory."""
    variables = {"LEDGER": directory, "CHECKPOINTS": directory, "SETTINGS": json.dumps(settings), "FAULTS": "[]"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        runpy.run_path(str(SCRIPT), run_name="__main__")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Faults one after the other, at moments that `seed` decides, in a run of the script with `settings`, whose steps
    without a fault are `reference`."""

    faults: tuple[Fault, ...]
    seed: int
    settings: Mapping[str, Any]
    reference: list[Step]
    plan: Plan

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(fault.name for fault in self.faults))

    @property
    def needs_disk(self) -> bool:
        return any(fault.small_disk for fault in self.faults)


def play(case: Case, directory: Path) -> tuple[Case, Figures, str]:
    """Let the faults happen, and look at what became of the run, also at what the command printed."""
    chance, began = random.Random(f"{case.name} {case.plan.name} {case.seed}"), time.monotonic()
    planned = list(zip(case.faults, _drawn(case, chance), strict=True))
    with FaultyRun(directory, case.settings, faults=_inside(planned, chance), options=OPTIONS) as run:
        with moments.small_disk(run.checkpoints) if case.needs_disk else nullcontext():
            run.start()
            happened = _inflict(planned, run, chance)
            finished = run.wait() == 0
        left = run.left_running()
        happened += [Moment(**json.loads(path.read_text())) for path in run.ledger.glob("fault*")]
        happened.sort(key=attrgetter("time"))
        figures = _figures(case, run, happened, finished, left, time.monotonic() - began)
    figures.keep()
    return case, figures, run.out


def check(case: Case, figures: Figures, out: str) -> None:
    """Check what every run has to come to."""
    assert figures.finished, out
    assert figures.worst_difference <= (0 if figures.plans == 1 else 1e-6)
    assert figures.misused_samples == 0
    assert figures.left_running == []
    assert figures.unmet == [], out
    assert figures.hits >= figures.planned / 2, f"{figures.hits} of {figures.planned} faults did what they should"
    missed = figures.planned - figures.hits
    assert figures.late + missed >= figures.planned / 2, f"{figures.steps}, {figures.checkpoints}"
    may_be = {word for fault in case.faults for word in (fault.ending, fault.early_ending)}
    ends = [fault for fault in case.faults if fault.ending is not None]
    assert set(figures.endings) <= may_be, out
    assert figures.hits - (len(case.faults) - len(ends)) <= len(figures.endings) <= len(ends), out
    if len(figures.blamed) == len(figures.hurt) and None not in figures.hurt:
        assert figures.blamed == figures.hurt, out
    if any(fault.small_disk for fault in case.faults) and figures.hits:
        assert figures.full_disk_alerts, out


def _drawn(case: Case, chance: random.Random) -> list[When]:
    """Return when each fault is to happen: at least half of them after the third checkpoint, none in the last step, so
    that it shows. A start is that of the attempt which the fault before it ended, so as late as that one."""
    count, steps = len(case.faults), int(case.settings["steps"])
    last = steps - (5 if any(fault.needs_checkpoints for fault in case.faults) else 1)
    early = count // 2
    drawn = sorted(chance.sample(range(2, LATE_STEP - 2), early)) + sorted(
        chance.sample(range(LATE_STEP, last), count - early)
    )
    return [
        When(
            step=step,
            checkpoints=LATE_CHECKPOINTS if number >= early else 0,
            is_start=number != early and _may_be_at_start(fault) and chance.random() < STARTING,
        )
        for number, (fault, step) in enumerate(zip(case.faults, drawn, strict=True))
    ]


def _may_be_at_start(fault: Fault) -> bool:
    return fault.inflict is not None and not fault.needs_checkpoints


Planned = Sequence[tuple[Fault, When]]


def _inside(planned: Planned, chance: random.Random) -> list[dict[str, Any]]:
    """Return what the script does to itself, and where."""
    return [
        {"kind": fault.inside, "rank": chance.randrange(2), "step": when.step}
        for fault, when in planned
        if fault.inside is not None
    ]


def _inflict(planned: Planned, run: FaultyRun, chance: random.Random) -> list[Moment]:
    happened = [fault.inflict(run, when, chance) for fault, when in planned if fault.inflict is not None]
    return [moment for moment in happened if moment is not None]


def _unmet(happened: Sequence[Moment], run: FaultyRun, starts: list[Start]) -> Iterator[str]:
    """Yield what should have followed a fault and did not."""
    for moment in happened:
        after = next((start for start in starts if start.began > moment.time), None)
        if after is not None and moment.goes_on_from not in (None, after.resumed_at):
            yield f"the run resumed from step {after.resumed_at} and not from {moment.goes_on_from}"
    for told, times in Counter(moment.told for moment in happened if moment.told).items():
        if (count := len(re.findall(told, run.out))) < times:
            yield f"the command told {count} and not {times} times: {told}"


def _figures(
    case: Case, run: FaultyRun, happened: list[Moment], finished: bool, left: list[str], seconds: float
) -> Figures:
    starts = run.starts()
    complete = finished and starts[-1].last_step == len(case.reference)
    steps = lineage(starts) if complete else []
    wrong = misused_samples(steps, int(case.settings["samples"])) if complete else {}
    hits = [progress(starts, moment.time) for moment in happened if moment.hit]
    return Figures(
        fault=case.name,
        seed=case.seed,
        strategy=case.plan.name,
        planned=len(case.faults),
        hits=len(hits),
        steps=[hit.step for hit in hits],
        checkpoints=[hit.checkpoints for hit in hits],
        finished=complete,
        plans=len({start.plan for start in starts}),
        worst_difference=worst_difference(steps, case.reference) if complete else float("nan"),
        misused_samples=sum(map(len, wrong.values())),
        endings=[row["kind"] for row in run.events("ending")],
        blamed=[row.get("rank") for row in run.events("ending")],
        hurt=[moment.rank for moment in happened],
        unmet=list(_unmet(happened, run, starts)),
        seconds_lost=[
            lost
            for number, start in enumerate(starts)
            if (lost := _seconds_lost(start, starts[number + 1 :])) is not None
        ],
        steps_repeated=[max(0, before.last_step - after.resumed_at) for before, after in itertools.pairwise(starts)],
        full_disk_alerts=sum("No space left" in str(row) for row in run.events("alert")),
        left_running=left,
        wall_seconds=seconds,
    )


def _seconds_lost(start: Start, later: list[Start]) -> float | None:
    """Seconds from the last sign of an attempt to the first step beyond it, or None if it had made the last one."""
    own = [row["time"] for rows in start.rows.values() for row in rows.values()]
    beyond = [
        row["time"]
        for attempt in later
        for rows in attempt.rows.values()
        for step, row in rows.items()
        if step > start.last_step
    ]
    return min(beyond) - max(own) if own and beyond else None
