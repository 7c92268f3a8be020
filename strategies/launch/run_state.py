"""What a run carries from attempt to attempt, and finds again in its directory when it is gone on with. No torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from planner.plan import Plan
from planner.plan_io import load_plan, plan_to_dict, save_plan
from strategies.launch.course import Course
from strategies.launch.journal import read_journal
from strategies.launch.orders import CHECKPOINTS, FailedPlan, Orders
from strategies.launch.report import highest_step
from strategies.launch.spec import LaunchSpec

PLAN_FILE = "plan.yaml"
_SAVES_FILE = "checkpoints.jsonl"


class RunState:
    """The plan in use, the orders of the attempt, and the course of the steps.

    `first` is the number of the first attempt of this command, above 0 where it goes on with a run.
    """

    def __init__(self, spec: LaunchSpec, plan: Plan | None, *, resumes: bool) -> None:
        self._spec = spec
        directory = spec.directory
        rows = read_journal(directory) if resumes else []
        earlier = Orders.load(directory) if resumes else None
        self.first = 1 + max((int(row.get("attempt", 0)) for row in rows), default=-1)
        if resumes and plan is None and (directory / PLAN_FILE).exists():
            plan = load_plan(directory / PLAN_FILE)
        self.plan: Plan | None = None
        self.orders = _orders(spec, earlier)
        self.course = Course(highest_step(directory) if resumes else 0)
        if resumes:
            self.notice_saves()
        if plan is not None:
            self._take(plan)

    @property
    def has_rejected_plan(self) -> bool:
        """Whether the plan in use has run out of memory before."""
        failed = [one.configuration for one in self.orders.failed_plans]
        return self.plan is not None and plan_to_dict(self.plan)["plan"] in failed

    def begin_attempt(self, attempt: int) -> None:
        """Write plan and orders of an attempt into the run directory, which no other command uses now.

        Raises:
            DsplanError: the directory cannot be written.
        """
        if self.plan is not None:
            self._keep_plan(self.plan)
        self.orders = replace(self.orders, attempt=attempt, resumes=attempt > 0)
        try:
            self.orders.save(self._spec.directory)
        except OSError as problem:
            directory = self._spec.directory
            raise DsplanError(
                f"{directory}: cannot be written ({problem.strerror}); make room, then go on with dsplan run --resume"
                f" {directory}"
            ) from None

    def adopt(self, plan: Plan) -> None:
        """`plan` is the one in use from here on; the first decides the global batch of all."""
        self._take(plan)
        self._keep_plan(plan)

    def _take(self, plan: Plan) -> None:
        self.plan = plan
        if self.orders.global_batch_size is None:
            self.orders = replace(self.orders, global_batch_size=plan.configuration.global_batch_size)

    def _keep_plan(self, plan: Plan) -> None:
        with suppress(BrokenFile):  # a full disk ends no training; the journal has the plan too
            save_plan(plan, self._spec.directory / PLAN_FILE)

    def reject_plan(self) -> None:
        """The plan in use ran out of memory: neither it nor one that needs as much is to follow."""
        if self.plan is not None:
            configuration = plan_to_dict(self.plan)["plan"]
            failed = FailedPlan(
                configuration=configuration,
                predicted_bytes=self.plan.memory.peak_allocated_bytes,
            )
            self.orders = replace(self.orders, failed_plans=(*self.orders.failed_plans, failed))

    def notice_saves(self) -> None:
        """Look which checkpoints there are."""
        for step in _saved_steps(self._spec.directory / _SAVES_FILE):
            self.course.saved(step)


def check_unfinished(directory: Path) -> None:
    """Refuse to go on with a run that is complete.

    Raises:
        DsplanError: it is.
    """
    ends = [row for row in read_journal(directory) if row.get("event") == "end"]
    if ends and ends[-1].get("outcome") == "completed":
        raise DsplanError(f"{directory}: the run completed, nothing is left to go on with; start a new one")


def _orders(spec: LaunchSpec, earlier: Orders | None) -> Orders:
    watched = spec.supervision
    return Orders(
        checkpoint_directory=watched.checkpoint_directory or str(spec.directory / CHECKPOINTS),
        checkpoint_minutes=watched.checkpoint_minutes,
        checkpoint_steps=watched.checkpoint_steps,
        hang_seconds=watched.hang_seconds,
        tunes=watched.tunes,
        global_batch_size=earlier.global_batch_size if earlier else None,
        failed_plans=earlier.failed_plans if earlier else (),
    )


def _saved_steps(path: Path) -> list[int]:
    """The steps of the checkpoints that are still there; a save that was only begun has no folder of its name."""
    steps = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            if Path(row["path"]).exists():
                steps.append(int(row["step"]))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
    return steps
