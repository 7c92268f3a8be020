"""A run from start to end: attempt after attempt, until the script is done or nothing more can be done. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

from hardware_db.notices import label_lines
from planner.types.plan import Plan
from planner.types.plan_io import plan_from_dict, plan_to_dict
from strategies.launch.attempt import Attempt, AttemptEnded, Event, OutputLine, PlanMade, RunFiles, RunIsBack, StepDone
from strategies.launch.failure_causes import Ending, remove_empty_stacks, with_stacks_as_log
from strategies.launch.grace_period import StopRequests
from strategies.launch.policy import Decision, Policy, RunContext
from strategies.launch.report import (
    COMPLETED,
    INTERRUPTED,
    AttemptReport,
    Outcome,
    RunReport,
    earlier_attempts,
    measured_run,
    outcome_of,
)
from strategies.launch.run_lock import RunLock, launcher_lock
from strategies.launch.run_record import RecordKeeper
from strategies.launch.state import RunState
from strategies.run_directory.claim import claimed_kind, saves_itself
from strategies.run_directory.files import REPORT_FILE
from strategies.run_directory.journal import Journal
from strategies.run_directory.machine import own_machine
from strategies.run_directory.spec import LaunchSpec
from strategies.supervision.lineage import RunCheckpoint
from strategies.telemetry.alerts import Alert
from strategies.telemetry.follow import AlertFollower

_WAIT_SECONDS = 0.1


class Companion(Protocol):
    """A process or a thread beside the ranks, which reads the files of the run and ends with it."""

    def start(self) -> None:
        """Start it, once; where nobody asked for it nothing is started."""

    def remarks(self) -> list[str]:
        """Return the lines that people are to read since the last call."""

    def finish(self, *, in_a_hurry: bool) -> Iterator[str]:
        """Wait for what it still has to do, and yield lines for people."""

    def close(self) -> None:
        """End it at once."""


class Supervisor:
    """A launched run. Iterate `events()` to its end, then ask for the `report()`.

    With `resumes`, the run directory holds a run to resume, from what `resume_from` names or else its newest
    checkpoint. The plan in use is kept there as `plan.yaml`, to run again with `--plan`. `record_attempt` is called for
    each attempt that others follow, before they are planned.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        plan: Plan | None,
        companions: Sequence[Companion],
        record_attempt: Callable[[Plan, Ending, LaunchSpec, int], None],
        *,
        resumes: bool,
        resume_from: str,
    ) -> None:
        self._spec = spec
        self._state = RunState(spec, plan, resumes=resumes, resume_from=resume_from)
        self._policy = Policy(spec.supervision.retries)
        self._journal = Journal(spec.directory)
        self._record = RecordKeeper(spec)
        self._earlier = earlier_attempts(spec.directory) if resumes else ()
        self._attempts: list[AttemptReport] = []
        self._outcome: Outcome | None = None
        self._number = self._state.first
        self._companions, self._record_attempt = tuple(companions), record_attempt

    def events(self) -> Iterator[Event]:
        """Start the ranks and give their lines, plans and steps until the run is over. Ctrl-C ends it.

        Raises:
            DsplanError: another command is at work in the run directory, or on this run elsewhere.
        """
        with ExitStack() as companions:
            for companion in self._companions:
                companions.callback(companion.close)
            with RunLock(self._spec.directory):
                self._record.take()
                with StopRequests() as requests, self._record.keep(requests):
                    yield from self._run_to_its_end(requests)
            # Behind the lock, whose release says to companions that nothing more comes.
            with suppress(KeyboardInterrupt):
                for companion in self._companions:
                    for text in companion.finish(in_a_hurry=requests.came):
                        yield OutputLine(rank=0, stream="stderr", text=label_lines(text))

    def _run_to_its_end(self, requests: StopRequests) -> Iterator[Event]:
        # Ranks of a command that was killed may still be about to end, and to say so in files of this directory.
        launcher_lock(self._spec.directory).close()
        self._spec.save()
        # A page that is there reports the end of a command that this one continues after.
        (self._spec.directory / REPORT_FILE).unlink(missing_ok=True)
        files, alerts = RunFiles(self._spec.directory), AlertFollower(self._spec.directory)
        decision: Decision | None = None
        while decision is None or decision.continues:
            attempt = Attempt(self._spec, files, alerts, requests, self._remarks)
            yield from self._run(attempt)
            decision = self._conclude(attempt, requests)
            if attempt.ending is not None and decision is not None:
                yield AttemptEnded(attempt=self._number, ending=attempt.ending, decision=decision)
            if decision is None or not decision.continues:
                break
            self._number += 1
            if not _wait(decision.delay_seconds, requests):
                superseded = Ending(kind="refused", reason=requests.superseded)
                stopped = superseded if requests.superseded else Ending(kind="preempted")
                self._outcome = INTERRUPTED if requests.interrupted else outcome_of(stopped)
                break
        self._write_end()

    def _remarks(self) -> list[str]:
        """Return the lines for people of what runs beside the ranks, since the last call."""
        ours = [text for companion in self._companions for text in companion.remarks()]
        return [*ours, *self._record.remarks()]

    def report(self) -> RunReport:
        """Return the finished run.

        Raises:
            RuntimeError: `events()` has not ended.
        """
        if self._outcome is None:
            raise RuntimeError("the run has not ended")
        return RunReport(
            spec=self._spec,
            outcome=self._outcome,
            measured=measured_run(self._spec),
            plan=self._state.plan,
            attempts=(*self._earlier, *self._attempts),
        )

    def _run(self, attempt: Attempt) -> Iterator[Event]:
        """Run one attempt to its end, with what it writes as events."""
        self._state.begin_attempt(self._number)
        self._state.course.begin(time.monotonic())
        placement = self._spec.placement
        ranks = self._spec.processes * placement.most_nodes
        self._note_saves(self._state.saves_to_note)
        self._state.saves_to_note = []
        options = self._state.options
        self._journal.append(
            "attempt",
            self._number,
            ranks=ranks,
            resumes=options.resumes,
            saved=self._state.saved,
            since=options.since,
            base=options.base,
        )
        if self._state.plan is not None:
            self._journal.append("plan", self._number, plan=plan_to_dict(self._state.plan))
        for companion in self._companions:
            companion.start()
        self._attempts.append(AttemptReport(attempt=self._number, began=time.time(), seconds=0.0, ranks=ranks))
        for happening in attempt.happenings():
            if isinstance(happening, dict):
                yield from self._metric_events(happening)
                continue
            if isinstance(happening, Alert):
                row = {name: value for name, value in happening.to_row().items() if name != "event"}
                self._journal.append("alert", self._number, **row)
            yield happening

    def _metric_events(self, row: dict[str, Any]) -> Iterator[Event]:
        if row.get("event") == "plan":
            plan = {key: value for key, value in row.items() if key != "event"}
            self._state.adopt(plan_from_dict(plan))
            self._journal.append("plan", self._number, plan=plan)
            yield PlanMade(plan=plan)
        elif row.get("event") == "step":
            yield from self._step_events(row)

    def _step_events(self, row: dict[str, Any]) -> Iterator[Event]:
        # Rows of scripts that dsplan does not resume count their own steps from 0.
        step = int(row.get("global_step") or int(row["step"]) + 1)
        yield StepDone(
            step=step,
            loss=row.get("loss"),
            seconds=float(row["seconds"]),
            samples=int(row.get("samples") or 0),
            tokens=int(row.get("tokens") or 0),
            peak_bytes=int(row.get("peak_bytes") or 0),
            rss_bytes=int(row.get("rss_bytes") or 0),
        )
        self._note_saves(self._state.notice_saves())
        is_first = self._state.course.first is None
        lost = self._state.course.reached(step, time.monotonic())
        if is_first and len(self._attempts) > 1:
            counts_anew = saves_itself(self._spec.directory)
            lost = None if counts_anew else lost
            before = self._attempts[-2]
            self._attempts[-2] = replace(before, seconds_lost=lost)
            self._journal.append("back", self._number, step=step, seconds_lost=lost)
            yield RunIsBack(step=step, seconds_lost=lost, counts_anew=counts_anew)

    def _note_saves(self, saves: Iterable[RunCheckpoint]) -> None:
        """Have the journal list checkpoints too: the list of them may be lost."""
        for checkpoint in saves:
            fields = {name: value for name, value in asdict(checkpoint).items() if name != "attempt"}
            self._journal.append("saved", checkpoint.attempt, **fields)

    def _conclude(self, attempt: Attempt, requests: StopRequests) -> Decision | None:
        """Write down how an attempt ended and decide what follows; return None if nothing has to be decided."""
        self._note_saves(self._state.notice_saves())
        remove_empty_stacks(self._spec.directory, self._number)
        course, ending = self._state.course, attempt.ending
        decision = None
        if ending is not None:
            # A rank that could not say where it was ended behind the last step seen.
            ending = ending if ending.step is not None else replace(ending, step=course.last)
            if ending.kind == "hung":
                ending = with_stacks_as_log(ending, self._spec.directory, self._number)
            attempt.ending = ending
            steps = {"first_step": course.first, "last_step": course.last}
            self._journal.append("ending", self._number, **ending.to_dict(), **steps)
            decision = self._decide(ending, stays=self._spec.placement.is_elastic and not requests.came)
        began = self._attempts[-1]
        self._attempts[-1] = replace(
            began,
            ranks=self._state.plan.configuration.world_size if self._state.plan else began.ranks,
            seconds=time.time() - began.began,
            plan=self._state.plan,
            first_step=course.first,
            last_step=course.last,
            ending=ending,
            decision=decision,
        )
        if ending is None:
            self._outcome = INTERRUPTED if requests.interrupted and not attempt.completed else COMPLETED
        elif decision is not None and not decision.continues:
            self._outcome = self._outcome_after(ending)
        return decision

    def _decide(self, ending: Ending, *, stays: bool) -> Decision:
        course = self._state.course
        now = RunContext(
            highest_step=course.highest,
            progressed=course.progressed,
            has_plan=self._may_have_another_plan(),
            can_resume=self._is_claimed,
            stays=stays,
            memory_bytes=_largest_memory(self._spec) if ending.kind == "out_of_memory" else None,
        )
        decision = self._policy.decide(ending, now)
        self._journal.append(
            "decision", self._number, action=decision.action, why=decision.why, delay_seconds=decision.delay_seconds
        )
        plan = self._state.plan
        if decision.continues and plan is not None and (decision.action == "next_plan" or course.progressed):
            self._record_attempt(plan, ending, self._spec, self._number)
        if decision.action == "next_plan":
            self._state.reject_plan()
        return decision

    @property
    def _is_claimed(self) -> bool:
        """True if somebody trains in the ranks who can resume and plan."""
        return claimed_kind(self._spec.directory) not in (None, "plain")

    def _may_have_another_plan(self) -> bool:
        """Return whether the ranks may find another plan, of which each of several nodes may know.

        One that was ruled out before and is still the newest did not run: memory ran out before the ranks had a plan.
        """
        if not self._is_claimed or self._state.has_rejected_plan:
            return False
        return self._state.plan is not None or self._spec.placement.most_nodes > 1

    def _outcome_after(self, ending: Ending) -> Outcome:
        """Return the outcome; a plan that ran out of memory without a successor is its reason, not the refusal."""
        before = self._attempts[-2].ending if len(self._attempts) > 1 else None
        if ending.kind == "refused" and before is not None and before.kind == "out_of_memory":
            return replace(outcome_of(before), reason=f"{before.reason}; then {ending.reason}")
        return outcome_of(ending)

    def _write_end(self) -> None:
        if self._outcome is not None:
            outcome, course = self._outcome, self._state.course
            self._journal.append(
                "end",
                self._attempts[-1].attempt,
                outcome=outcome.name,
                exit_code=outcome.exit_code,
                step=course.highest,
                first_step=course.first,
                last_step=course.last,
            )


def _largest_memory(spec: LaunchSpec) -> int:
    """Return the bytes of the largest GPU or of the host, whichever is more."""
    machine = own_machine(spec.environment)
    host = machine.host.memory_limit_bytes or machine.host.memory_total_bytes or 0
    return max([host, *(gpu.total_bytes or 0 for gpu in machine.usable_gpus)])


def _wait(seconds: float, requests: StopRequests) -> bool:
    """Let time pass; False where a request to stop came meanwhile."""
    until = time.monotonic() + seconds
    while not requests.came and time.monotonic() < until:
        time.sleep(_WAIT_SECONDS)
    return not requests.came
