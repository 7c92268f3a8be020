"""The state that a run carries from attempt to attempt, and reads from its directory when it is resumed. No torch."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile, DsplanError
from planner.types.plan import Plan
from planner.types.plan_io import load_plan, plan_to_dict, save_plan
from strategies.checkpoint.object_store import ObjectPath, location
from strategies.launch.report import highest_step, last_attempt_in
from strategies.run_directory.attempt_options import AttemptOptions, FailedPlan
from strategies.run_directory.files import CHECKPOINTS, LINEAGE_FILE, PLAN_FILE
from strategies.run_directory.journal import read_journal
from strategies.run_directory.spec import LaunchSpec
from strategies.supervision import lineage

# Progress of a run: steps, times, and the cost of restarts.


_NEVER = -1.0


class Course:
    """The steps of a run as they are seen, counted from 1 over all attempts; times are of a clock that only runs on.

    `highest` is the highest step ever reached, `first` and `last` those of the present attempt, None before it has any.
    """

    def __init__(self, highest: int = 0) -> None:
        self.highest = highest
        self.first: int | None = None
        self.last: int | None = None
        self._before = highest
        self._saved = self._saved_before = 0
        self._reached = array("d")
        self._began: list[float] = []

    @property
    def progressed(self) -> bool:
        """True if the present attempt got further than all before it, or saved what a crash had undone."""
        return self.highest > self._before or self._saved > self._saved_before

    def begin(self, now: float) -> None:
        """Begin an attempt."""
        self.first = self.last = None
        self._before, self._saved_before = self.highest, self._saved
        self._began.append(now)

    def reached(self, step: int, now: float) -> float | None:
        """Note a step; for a later attempt's first, return by how many seconds the restart put the run back.

        None where that cannot be known, as for a run that another command resumed.
        """
        lost = self._put_back(step, now) if self.first is None and len(self._began) > 1 else None
        self.first = step if self.first is None else self.first
        self.last = step
        self.highest = max(self.highest, step)
        self._reached.extend([_NEVER] * (step + 1 - len(self._reached)))
        self._reached[step] = now
        return lost

    def saved(self, step: int) -> None:
        """Note that the newest checkpoint is one of `step`."""
        self._saved = max(self._saved, step)

    def _put_back(self, step: int, now: float) -> float | None:
        """Return the seconds since the step was done before, else since the one before it, else since the run began."""
        for earlier in (step, step - 1):
            if earlier < len(self._reached) and self._reached[earlier] != _NEVER:
                return now - self._reached[earlier]
        return self._began[-1] - self._began[0] if step == 1 else None


BEGIN_ANEW = "start"
"""`--resume-from start`: no checkpoint of the run counts."""
_STEPS = ("step", "last_step")
_BEGUN_AT_ONCE = 8
"""No more saves than these are under way at once: whatever else was begun and is not there never came to be."""


class RunState:
    """The plan in use, the options of the attempt, and the course of the steps.

    `first` is the number of the first attempt of this command, above 0 where it resumes a run. `resume_from` is
    what `--resume-from` names: a checkpoint, or `start`.
    """

    def __init__(self, spec: LaunchSpec, plan: Plan | None, *, resumes: bool, resume_from: str = "") -> None:
        self._spec = spec
        self._resumes = resumes
        directory = spec.directory
        rows = read_journal(directory) if resumes else []
        earlier = AttemptOptions.load(directory) if resumes else None
        self.first = _next_attempt(directory, rows, earlier) if resumes else 0
        if resumes and plan is None and (directory / PLAN_FILE).exists():
            plan = load_plan(directory / PLAN_FILE)
        self.plan: Plan | None = None
        self.options = replace(_options(spec, earlier), **_begun_anew(rows, earlier))
        if resume_from:
            self.options = replace(
                self.options, since=self.first, base="" if resume_from == BEGIN_ANEW else resume_from
            )
        lists = lineage.read_lineage(directory) if resumes else lineage.Lineage()
        self._journalled = {checkpoint.path for checkpoint in lists.journalled}
        self._saved = max((checkpoint.step for checkpoint in lists.journalled if self._counts(checkpoint)), default=0)
        self._has_full_story = not resumes or bool(resume_from) or _reports_every_save(rows, lists)
        self._seen, self._lines = (0, 0), 0
        self._in_stores: frozenset[str] = frozenset()
        self._begun: dict[str, lineage.RunCheckpoint] = {}
        self.course = Course(_highest_step(directory, rows, self.options.since) if resumes else 0)
        self.saves_to_note = self.notice_saves() if resumes else []
        if plan is not None:
            self._take(plan)

    @property
    def has_rejected_plan(self) -> bool:
        """True if the plan in use has run out of memory before."""
        failed = [plan.configuration for plan in self.options.failed_plans]
        return self.plan is not None and plan_to_dict(self.plan)["plan"] in failed

    def begin_attempt(self, attempt: int) -> None:
        """Write plan and options of an attempt into the run directory, which no other command uses now.

        Raises:
            DsplanError: the directory cannot be written.
        """
        if self.plan is not None:
            self._keep_plan(self.plan)
        self.options = replace(
            self.options,
            attempt=attempt,
            resumes=attempt > 0 or self._resumes,
            reached=self.course.highest,
            may_begin_anew=self._has_full_story and not self.saved and not self.options.base,
        )
        try:
            self.options.save(self._spec.directory)
        except OSError as problem:
            directory = self._spec.directory
            raise DsplanError(
                f"{directory}: cannot be written ({problem.strerror}); make room, then resume with dsplan run --resume"
                f" {directory}"
            ) from None

    def adopt(self, plan: Plan) -> None:
        """Use `plan` from here on; the first decides the global batch of all."""
        self._take(plan)
        self._keep_plan(plan)

    def _take(self, plan: Plan) -> None:
        self.plan = plan
        if self.options.global_batch_size is None:
            self.options = replace(self.options, global_batch_size=plan.configuration.global_batch_size)

    def _keep_plan(self, plan: Plan) -> None:
        with suppress(BrokenFile):  # a full disk ends no training; the journal has the plan too
            save_plan(plan, self._spec.directory / PLAN_FILE)

    def reject_plan(self) -> None:
        """Rule out the plan in use, which ran out of memory, and those that need as much."""
        if self.plan is not None:
            configuration = plan_to_dict(self.plan)["plan"]
            failed = FailedPlan(configuration=configuration, predicted_bytes=self.plan.memory.peak_allocated_bytes)
            self.options = replace(self.options, failed_plans=(*self.options.failed_plans, failed))

    @property
    def saved(self) -> int:
        """The furthest step of which there has been a complete checkpoint that counts; 0 where there was none."""
        return self._saved

    def notice_saves(self) -> list[lineage.RunCheckpoint]:
        """Look which checkpoints there are, and return those that the journal has not."""
        self._read_list()
        complete = [checkpoint for checkpoint in self._begun.values() if self._is_there(checkpoint.path)]
        waiting = [checkpoint for checkpoint in self._begun.values() if checkpoint not in complete]
        self._begun = {checkpoint.path: checkpoint for checkpoint in waiting[-_BEGUN_AT_ONCE:]}
        for checkpoint in complete:
            if self._counts(checkpoint):
                self.course.saved(checkpoint.step)
                self._saved = max(self._saved, checkpoint.step)
        new = [checkpoint for checkpoint in complete if checkpoint.path not in self._journalled]
        self._journalled |= {checkpoint.path for checkpoint in new}
        return new

    def _is_there(self, path: str) -> bool:
        """Return whether a checkpoint is complete; of one in an object store the list says so: stores are slow."""
        path_or_address = location(path)
        return path in self._in_stores if isinstance(path_or_address, ObjectPath) else path_or_address.exists()

    def _read_list(self) -> None:
        """Take over what the list names, where it has changed. A save that was only begun has no folder of its name."""
        try:
            state = (self._spec.directory / LINEAGE_FILE).stat()
        except OSError:
            return  # nothing has been saved yet
        if self._seen != (state.st_mtime_ns, state.st_size):
            self._seen = (state.st_mtime_ns, state.st_size)
            lists = lineage.read_lineage(self._spec.directory)
            listed, self._in_stores = lists.listed, lists.in_stores
            new = listed[self._lines :] if len(listed) >= self._lines else listed
            self._lines = len(listed)
            self._begun |= {checkpoint.path: checkpoint for checkpoint in new}

    def _counts(self, checkpoint: lineage.RunCheckpoint) -> bool:
        return self.options.counts(checkpoint.run, checkpoint.attempt)


def check_unfinished(directory: Path) -> None:
    """Refuse to resume a run that is complete.

    Raises:
        DsplanError: it is.
    """
    ends = [row for row in read_journal(directory) if row.get("event") == "end"]
    if ends and ends[-1].get("outcome") == "completed":
        raise DsplanError(f"{directory}: the run completed, nothing is left to resume; start a new one")


def _options(spec: LaunchSpec, earlier: AttemptOptions | None) -> AttemptOptions:
    directory = spec.supervision.checkpoint_directory or str(spec.directory / CHECKPOINTS)
    return AttemptOptions(
        supervision=replace(spec.supervision, checkpoint_directory=directory),
        global_batch_size=earlier.global_batch_size if earlier else None,
        failed_plans=earlier.failed_plans if earlier else (),
        run_id=spec.run_id,
        has_nodes=spec.placement.most_nodes > 1,
        most_ranks=spec.processes * spec.placement.most_nodes,
    )


def _begun_anew(rows: list[dict[str, Any]], earlier: AttemptOptions | None) -> dict[str, Any]:
    """Return from where the run's checkpoints count, of its last options or else of its journal."""
    if earlier is not None:
        return {"since": earlier.since, "base": earlier.base}
    began = [row for row in rows if row.get("event") == "attempt"]
    return {"since": _number(began[-1], "since"), "base": str(began[-1].get("base") or "")} if began else {}


def _next_attempt(directory: Path, rows: list[dict[str, Any]], earlier: AttemptOptions | None) -> int:
    """Return one more than any attempt known of; a journal that is gone or cut knows of fewer than there were."""
    attempts = [_number(row, "attempt") for row in rows]
    return 1 + max([*attempts, -1 if earlier is None else earlier.attempt, last_attempt_in(directory)])


def _highest_step(directory: Path, rows: list[dict[str, Any]], since: int) -> int:
    """Return the highest step that metrics or journal report in attempts from `since` on."""
    counted = [row for row in rows if _number(row, "attempt") >= since]
    return max([highest_step(directory, since), *(_number(row, name) for row in counted for name in _STEPS)])


def _number(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _reports_every_save(rows: list[dict[str, Any]], lists: lineage.Lineage) -> bool:
    """Return whether the journal is whole, so that no checkpoint that it does not list was ever complete."""
    began = [row for row in rows if row.get("event") == "attempt"]
    is_whole = [row.get("attempt") for row in began] == list(range(len(began)))
    return bool(began) and is_whole and all("saved" in row for row in began) and not lists.damaged_lines
