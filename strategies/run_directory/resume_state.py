"""Findings of a run's earlier attempts, and their meaning for the plan of this one. No torch.

Every node has a run directory of its own, and what failed may be known on one of them alone. `Findings` is what one
node knows; `combined` makes one ResumeState of all of them, the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from hardware_db.from_json import from_json
from planner.calibration.oom_history import OomRecord
from planner.errors import DsplanError
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import configuration_from_dict, load_plan, plan_from_dict, plan_to_dict
from strategies.run_directory.attempt_options import AttemptOptions, FailedPlan
from strategies.run_directory.files import PLAN_FILE, TUNING_FILE, metrics_files, read_json, write_json

# Measurements of tuning: `tuning.json` in the run directory of rank 0's node.


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A plan (the object of the JSON contract) and the seconds that its step took, without the first ones."""

    plan: Mapping[str, Any]
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The plans that were measured, in this order; the one to resume with; and whether nothing is to be tried any more.

    `switches` counts the changes of plan that were made.
    """

    tried: tuple[Tried, ...] = ()
    following: Mapping[str, Any] | None = None
    is_over: bool = False
    switches: int = 0

    def in_order(self) -> list[Mapping[str, Any]]:
        """Return the plan to resume with, then those that were measured, fastest first."""
        fastest = [trial.plan for trial in sorted(self.tried, key=lambda trial: trial.step_seconds)]
        return [*((self.following,) if self.following else ()), *fastest]

    def save(self, run_directory: Path) -> None:
        """Replace the file."""
        write_json(run_directory / TUNING_FILE, asdict(self))

    @classmethod
    def load(cls, run_directory: Path) -> Tuning | None:
        """Read the file; None if there is none."""
        path = run_directory / TUNING_FILE
        return read_json(cls, path) if path.exists() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The contents of one node's run directory that decide what is resumed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    is_resumed: bool = False
    tuned: tuple[Mapping[str, Any], ...] = ()
    """The plans that tuning came to, best first."""
    last: Mapping[str, Any] | None = None
    """The plan that ran last."""
    written: float = 0.0
    """When they were, in seconds since 1970."""

    def to_text(self) -> str:
        """Return what `from_text` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Findings:
        """Read another node's findings."""
        return from_json(cls, json.loads(text))

    @classmethod
    def of(cls, run_directory: Path) -> Findings:
        """Return those of a run directory, before any rank of this attempt writes to it."""
        options = AttemptOptions.load(run_directory)
        if options is None:
            return cls()
        tuning, last = Tuning.load(run_directory), run_directory / PLAN_FILE
        files = [path for path in (run_directory / TUNING_FILE, last) if path.exists()]
        began = any(path.stat().st_size for path in metrics_files(run_directory).values())
        return cls(
            options=asdict(options),
            is_resumed=options.attempt > 0 or options.resumes or began,
            tuned=tuple(tuning.in_order()) if tuning else (),
            last=plan_to_dict(load_plan(last)) if last.exists() else None,
            written=max((path.stat().st_mtime for path in files), default=0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The state of a run when its ranks start.

    `is_resumed` says that earlier ranks of it have trained, or tried to. Every plan keeps `global_batch_size`, which is
    None before the first plan. `plan` is the one to resume with, None if one has to be found; it is for `ranks` ranks,
    the first of those that were started. `is_given` says that it is the one of the command line. There are `most_ranks`
    when all of a run's nodes have come.
    """

    ranks: int
    is_resumed: bool = False
    attempt: int = 0
    tunes: bool = False
    global_batch_size: int | None = None
    failed_plans: tuple[FailedPlan, ...] = ()
    plan: Plan | None = None
    is_given: bool = False
    most_ranks: int = 0

    @property
    def chooses_anew(self) -> bool:
        """True if the request may be meant for other ranks: those of an earlier attempt, or of nodes not here."""
        return self.is_resumed or self.ranks < self.most_ranks

    def has_failed(self, plan: Plan) -> bool:
        """Return whether a plan ran out of memory in this run, or is predicted to take as much as one that did.

        The rule is the planner's (`OomRecord`); what a failed plan took of the host is not recorded.
        """
        return any(_rules_out(failed, plan) for failed in self.failed_plans)

    def to_text(self) -> str:
        """Return what `from_text` reads."""
        plan = None if self.plan is None else plan_to_dict(self.plan)
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in ("plan", "failed_plans")}
        return json.dumps({**rest, "failed_plans": [asdict(failed) for failed in self.failed_plans], "plan": plan})

    @classmethod
    def from_text(cls, text: str) -> ResumeState:
        """Read rank 0's state."""
        raw = json.loads(text)
        plan = None if raw["plan"] is None else plan_from_dict(raw["plan"])
        return replace(from_json(cls, {**raw, "plan": None}), plan=plan)


def combined(
    findings: Iterable[Findings],
    ranks: int,
    given: Plan | None = None,
    strategy: str | None = None,
    degrees: Mapping[str, Any] | None = None,
) -> ResumeState:
    """Return what all nodes' findings mean for `ranks` ranks that were started.

    `given`, `strategy` and `degrees` are those of the command line; a plan of another strategy is not resumed with, nor
    one of other degrees where these divide the ranks. Where the global batch cannot be split over the ranks, as many of
    them train as it can be split over; ranks that work on the same sample need no batch of their own.
    """
    newest_first = sorted(findings, key=lambda finding: finding.written, reverse=True)
    is_resumed = any(finding.is_resumed for finding in newest_first)
    options = [finding.options for finding in newest_first if finding.options]
    most = max((int(attempt.get("most_ranks") or 0) for attempt in options), default=0)
    if not is_resumed:
        return ResumeState(
            ranks=ranks, tunes=any(attempt["supervision"]["tunes"] for attempt in options), most_ranks=most
        )
    tuned = [plan_from_dict(plan) for finding in newest_first for plan in finding.tuned]
    plans = [
        *tuned,
        *([given] if given else ()),
        *(plan_from_dict(finding.last) for finding in newest_first if finding.last),
    ]
    batches = [attempt["global_batch_size"] for attempt in options] + [
        plan.configuration.global_batch_size for plan in plans
    ]
    batch = next((size for size in batches if size), None)
    failed = {json.dumps(entry, sort_keys=True): entry for each in options for entry in each["failed_plans"]}
    sharing = prod(int((degrees or {}).get(name, 1)) for name in ("tp", "pp", "cp"))
    state = ResumeState(
        ranks=_training(ranks, batch, plans, sharing) if batch else ranks,
        is_resumed=True,
        attempt=max((int(attempt["attempt"]) for attempt in options), default=0),
        tunes=any(attempt["supervision"]["tunes"] for attempt in options),
        global_batch_size=batch,
        failed_plans=tuple(FailedPlan(**entry) for entry in failed.values()),
        most_ranks=most,
    )
    of_strategy = (candidate for candidate in plans if strategy in (None, candidate.configuration.strategy))
    if degrees and state.ranks % sharing == 0:
        of_strategy = (each for each in of_strategy if _has(each.configuration, degrees))
    for_ranks = (candidate for candidate in of_strategy if candidate.configuration.world_size == state.ranks)
    plan = next((candidate for candidate in for_ranks if not state.has_failed(candidate)), None)
    return replace(state, plan=plan, is_given=plan is not None and plan is given)


def _has(configuration: Configuration, degrees: Mapping[str, Any]) -> bool:
    return all(getattr(configuration, name, value) == value for name, value in degrees.items())


def _training(ranks: int, batch: int, plans: Iterable[Plan], sharing: int) -> int:
    """Return how many ranks train: all, if a plan or the batch allows it, else as many as divide the batch."""
    if any(plan.configuration.world_size == ranks for plan in plans):
        return ranks
    readers, rest = divmod(ranks, sharing)
    return ranks if readers and not rest and batch % readers == 0 else largest_divisor(batch, ranks)


def largest_divisor(batch: int, ranks: int) -> int:
    """Return the most ranks up to `ranks` over which a global batch can be split evenly."""
    return next(count for count in range(ranks, 0, -1) if batch % count == 0)


def configuration_of(failed: FailedPlan) -> Configuration | None:
    """Return the configuration of a failed plan, or None if it is of a release that knew other words."""
    try:
        return configuration_from_dict(failed.configuration)
    except DsplanError:
        return None


def _rules_out(failed: FailedPlan, plan: Plan) -> bool:
    configuration = configuration_of(failed)
    if configuration is None:
        return plan.memory.peak_allocated_bytes >= failed.predicted_bytes
    record = OomRecord(configuration=configuration, peak_allocated_bytes=failed.predicted_bytes)
    on_cpu = plan.cluster.get("vendor") == "cpu"
    counts = record.counts_for(plan.configuration.world_size, on_cpu=on_cpu)
    return counts and record.takes_no_more_than(plan.configuration, plan.memory)
