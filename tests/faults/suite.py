"""A run with several faults of one kind, and what is asked of it afterwards."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import moments
import pytest
from faulty_run import FaultyRun
from ledger import Start, Step, lineage, misused_samples, worst_difference
from moments import Inflict, Moment

Reference = Callable[[Mapping[str, Any]], list[Step]]
"""The steps of a run with some settings to which nothing happens."""
FIGURES = "FAULT_FIGURES"
"""Names a file to which every run's figures are appended, as a line of JSON."""
OPTIONS = ("--checkpoint-steps", "3", "--retries", "5", "--hang-minutes", "0.15")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A kind of fault: `inflict` does it from outside, `inside` names what the script does to itself.

    `ending` is the journal's word for how an attempt that met it ended, None where the attempt goes on, and
    `early_ending` what it may be while the ranks start. `per_run` of them happen to a run of the whole suite.
    """

    name: str
    ending: str | None
    early_ending: str | None = None
    inflict: Inflict | None = None
    inside: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    small_disk: bool = False
    per_run: int = 4


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="kill -9 of a rank", ending="killed", inflict=moments.kill_a_rank),
        Fault(
            name="kill -9 of a rank that saves",
            ending="killed",
            inflict=moments.kill_a_rank_that_saves,
            settings={"width": 512},
        ),
        Fault(name="kill -9 of the agent", ending="killed", inflict=moments.kill_the_agent),
        Fault(name="kill -9 of dsplan run", ending=None, inflict=moments.kill_the_command),
        Fault(name="SIGTERM", ending="preempted", inflict=moments.preempt),
        # Of ranks that have not met yet, the one that came waits, gives up, and the agent kills the other.
        Fault(name="SIGSTOP of a rank", ending="hung", early_ending="killed", inflict=moments.stop_a_rank),
        Fault(name="a rank sleeps", ending="hung", inside="sleep"),
        Fault(name="a rank holds the lock", ending="hung", inside="hold"),
        # Its connection to the data is lost, which another attempt may help; a bug that comes again ends a run.
        Fault(name="a rank raises", ending="lost", inside="raise"),
        Fault(name="out of memory", ending="out_of_memory", inside="out_of_memory", settings={"dropout": 0}, per_run=2),
        Fault(
            name="out of host memory", ending="out_of_memory", inside="host_memory", settings={"dropout": 0}, per_run=2
        ),
        Fault(name="full disk", ending=None, inflict=moments.fill_the_disk, settings={"pause": 0.25}, small_disk=True),
        Fault(
            name="full disk, then kill -9 of a rank",
            ending="killed",
            inflict=moments.fill_the_disk_and_kill,
            settings={"pause": 0.25},
            small_disk=True,
        ),
    )
}


DEFAULTS = {"steps": 40, "samples": 80, "batch": 8, "width": 128, "dropout": 0.1, "pause": 0.05}
PLANS = (
    {"strategy": "ddp", "backend": "torch"},
    {"strategy": "zero2", "backend": "native"},
    {"strategy": "fsdp", "backend": "torch"},
    {"strategy": "zero3", "backend": "native"},
)
"""Runs take these in turn."""


def settings_of(fault: Fault, number: int) -> dict[str, Any]:
    """What the script of a run is told, where the fault can happen on this machine."""
    if fault.small_disk and os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    plan = {} if fault.ending == "out_of_memory" else PLANS[number % len(PLANS)]
    return {**DEFAULTS, **plan, **fault.settings}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a run came to. `worst_difference` is that of a step's loss from the uninterrupted run's; `blamed` are
    the ranks that the journal names for the `endings`, `hurt` those to which something was done. `seconds_lost` and
    `steps_repeated` are those of every attempt that went on: from the last sign of the one before to a new step,
    and how many steps that had been begun were made again."""

    fault: str
    seed: int
    strategy: str
    moments: int
    hits: int
    finished: bool
    plans: int
    worst_difference: float
    misused_samples: int
    endings: list[str]
    blamed: list[int | None]
    hurt: list[int | None]
    seconds_lost: list[float]
    steps_repeated: list[int]
    full_disk_alerts: int
    left_running: list[str]
    wall_seconds: float

    def keep(self) -> None:
        """Append to the file that `FAULT_FIGURES` names."""
        if path := os.environ.get(FIGURES):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(self)) + "\n")


def uninterrupted(directory: Path, settings: Mapping[str, Any]) -> list[Step]:
    """The steps of a run to which nothing happens."""
    with FaultyRun(directory, settings, options=OPTIONS) as run:
        run.start()
        assert run.wait() == 0, run.out
        (start,) = run.starts()
        return lineage([start])


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Faults one after the other, at moments that `seed` decides, in a run of the script with `settings`, whose steps
    without a fault are `reference`."""

    faults: tuple[Fault, ...]
    seed: int
    settings: Mapping[str, Any]
    reference: list[Step]

    @property
    def name(self) -> str:
        return ", ".join(dict.fromkeys(fault.name for fault in self.faults))

    @property
    def needs_disk(self) -> bool:
        return any(fault.small_disk for fault in self.faults)


def play(case: Case, directory: Path) -> tuple[Case, Figures, str]:
    """Let the faults happen, and look at what became of the run, also at what the command printed."""
    chance, began = random.Random(f"{case.name} {case.seed}"), time.monotonic()
    with FaultyRun(directory, case.settings, faults=_inside(case, chance), options=OPTIONS) as run:
        with moments.small_disk(run.checkpoints) if case.needs_disk else nullcontext():
            run.start()
            happened = _inflict(case, run, chance)
            finished = run.wait() == 0
        left = run.left_running()
        happened += [Moment(**json.loads(path.read_text())) for path in run.ledger.glob("fault*")]
        figures = _figures(case, run, happened, finished, left, time.monotonic() - began)
    figures.keep()
    return case, figures, run.out


def check(case: Case, figures: Figures, out: str) -> None:
    """What every run has to come to."""
    assert figures.finished, out
    assert figures.worst_difference <= (0 if figures.plans == 1 else 1e-6)
    assert figures.misused_samples == 0
    assert figures.left_running == []
    may_be = {word for fault in case.faults for word in (fault.ending, fault.early_ending)}
    ends = [fault for fault in case.faults if fault.ending is not None]
    assert set(figures.endings) <= may_be, out
    assert figures.hits - (len(case.faults) - len(ends)) <= len(figures.endings) <= len(ends), out
    if len(figures.blamed) == len(figures.hurt) and None not in figures.hurt:
        assert figures.blamed == figures.hurt, out
    if any(fault.small_disk for fault in case.faults) and figures.hits:
        assert figures.full_disk_alerts, out


def _inside(case: Case, chance: random.Random) -> list[dict[str, Any]]:
    """What the script does to itself, and where: any step but for the last, so that it shows."""
    kinds = [fault.inside for fault in case.faults if fault.inside is not None]
    steps = sorted(chance.sample(range(2, int(case.settings["steps"])), len(kinds)))
    return [{"kind": kind, "rank": chance.randrange(2), "step": step} for kind, step in zip(kinds, steps, strict=True)]


def _inflict(case: Case, run: FaultyRun, chance: random.Random) -> list[Moment]:
    happened = [fault.inflict(run, chance) for fault in case.faults if fault.inflict is not None]
    return [moment for moment in happened if moment is not None]


def _figures(
    case: Case, run: FaultyRun, happened: list[Moment], finished: bool, left: list[str], seconds: float
) -> Figures:
    starts = run.starts()
    complete = finished and starts[-1].last_step == len(case.reference)
    steps = lineage(starts) if complete else []
    wrong = misused_samples(steps, int(case.settings["samples"])) if complete else {}
    return Figures(
        fault=case.name,
        seed=case.seed,
        strategy=str(case.settings.get("strategy")),
        moments=len(happened),
        hits=sum(moment.hit for moment in happened),
        finished=complete,
        plans=len({start.plan for start in starts}),
        worst_difference=worst_difference(steps, case.reference) if complete else float("nan"),
        misused_samples=sum(map(len, wrong.values())),
        endings=[row["kind"] for row in run.events("ending")],
        blamed=[row.get("rank") for row in run.events("ending")],
        hurt=[moment.rank for moment in sorted(happened, key=attrgetter("time"))],
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
    """From the last sign of an attempt to the first step beyond it; None where it had made the last one."""
    own = [row["time"] for rows in start.rows.values() for row in rows.values()]
    beyond = [
        row["time"]
        for one in later
        for rows in one.rows.values()
        for step, row in rows.items()
        if step > start.last_step
    ]
    return min(beyond) - max(own) if own and beyond else None
