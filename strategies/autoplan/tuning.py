"""Tuning: the first steps of an attempt measure its plan; a plan that is predicted faster with that takes over.

The measured steps correct the prediction of every other plan (`Experience.correction`). Changing the plan means saving
and starting again, so what is gained in PAYS_BACK_SECONDS must be more than what the start took. A plan that turns out
slower than one that was measured before gives way to that one, and nothing is tried after it. The global batch stays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from torch import nn

from hardware_db.measurement import utc_now
from hardware_db.notices import notice
from hardware_db.units import format_seconds
from planner.calibration.experience import KnownRun
from planner.cost.timing import step_time
from planner.errors import DsplanError
from planner.search.estimate import job_of
from planner.search.request import Request
from planner.search.search import describe, recommend
from planner.types.plan import Plan
from planner.types.plan_io import plan_from_dict, plan_to_dict
from strategies.autoplan.fallback import exclude_failed
from strategies.autoplan.live import live_request, machine_rates
from strategies.autoplan.select import PlanningOptions
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.environment import Environment
from strategies.protocols import Observer
from strategies.run_directory.resume_state import ResumeState, Tried, Tuning
from strategies.run_directory.state_consensus import current
from strategies.supervision.autosave import SupervisedEngine
from strategies.supervision.supervision import stop_here
from strategies.telemetry.metrics import WARM_UP_STEPS

FASTER_BY = 0.1
"""Share of a step that another plan must be predicted to save."""
SLOWER_BY = 0.03
"""Share of a step by which a plan must have been measured slower than another one to give way to it."""
PAYS_BACK_SECONDS = 600.0
MOST_SWITCHES = 3
SETTLING_STEPS = WARM_UP_STEPS + 1
"""On a CPU the step after the warm-up is slower, since its memory is counted."""
MEASURED_STEPS = 10
MEASURED_SECONDS = 1.0
"""Shorter measurements than this are repeated over twice as many steps."""
LONGEST = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The consequence of a measurement."""

    tuning: Tuning
    """Its state from now on."""
    switches: bool = False
    why: str | None = None
    """The reason for a switch."""


def decide(plan: Plan, step_seconds: float, before: Tuning, request: Request, start_seconds: float) -> Decision:
    """Decide what to do after a plan's step was measured; `start_seconds` is what starting the ranks again takes.

    Raises:
        DsplanError: the search refuses the request.
    """
    tried = _add_trial(before.tried, Tried(plan=plan_to_dict(plan), step_seconds=step_seconds))
    stays = Tuning(tried=tried, following=plan_to_dict(plan), is_over=True, switches=before.switches)
    if before.switches >= MOST_SWITCHES:
        return Decision(tuning=stays)
    best = min(tried, key=lambda trial: trial.step_seconds)
    if step_seconds > (1 + SLOWER_BY) * best.step_seconds:
        back = replace(stays, following=best.plan, switches=before.switches + 1)
        if _pays(step_seconds, best.step_seconds, start_seconds):
            return Decision(tuning=back, switches=True, why=_sentence(plan, step_seconds, best))
        return Decision(tuning=stays)
    first = next(iter(recommend(_add_experience(request, tried)).plans), plan)
    if first.configuration == plan.configuration or not _gains(step_seconds, first.time.step_seconds, start_seconds):
        return Decision(tuning=stays)
    # That steps take longer than predicted is no reason to restart: they may on this machine whatever the plan.
    if _predict(request, first) > (1 - FASTER_BY) * _predict(request, plan):
        return Decision(tuning=stays)
    offer = Tried(plan=plan_to_dict(first), step_seconds=first.time.step_seconds)
    follows = replace(stays, following=offer.plan, is_over=False, switches=before.switches + 1)
    return Decision(tuning=follows, switches=True, why=_sentence(plan, step_seconds, offer, measured=False))


def _predict(request: Request, plan: Plan) -> float:
    """Return the seconds of a step as the model alone predicts it."""
    return step_time(job_of(request, plan.configuration)).step_seconds


def _gains(now: float, then: float, start_seconds: float) -> bool:
    return then < (1 - FASTER_BY) * now and _pays(now, then, start_seconds)


def _pays(now: float, then: float, start_seconds: float) -> bool:
    return (1 - then / now) * PAYS_BACK_SECONDS > start_seconds


def _add_experience(request: Request, tried: Sequence[Tried]) -> Request:
    """Return the request with what was measured in this run, and without what failed in it."""
    measured = {
        plan_from_dict(trial.plan).configuration: KnownRun(
            step_seconds=trial.step_seconds, each=(trial.step_seconds,), created_at=utc_now()
        )
        for trial in tried
    }
    experience = replace(request.experience, known_runs={**request.experience.known_runs, **measured})
    fastest = replace(request, experience=experience, simplest_first=False, objective="throughput", top=1)
    return exclude_failed(fastest, current().failed_plans)


def _add_trial(tried: Sequence[Tried], trial: Tried) -> tuple[Tried, ...]:
    return (*(other for other in tried if other.plan["plan"] != trial.plan["plan"]), trial)


def _sentence(plan: Plan, step_seconds: float, other: Tried, *, measured: bool = True) -> str:
    then = plan_from_dict(other.plan)
    return (
        f"a step of {_describe(plan)} takes {format_seconds(step_seconds)}; {_describe(then)}"
        f" {'took' if measured else 'is predicted to take'} {format_seconds(other.step_seconds)}: changing to it"
    )


def _describe(plan: Plan) -> str:
    chosen = plan.configuration
    extra = "" if chosen.activation_checkpointing == "none" else f", {chosen.activation_checkpointing} checkpointing"
    return f"{describe(plan)} at micro-batch {chosen.micro_batch_size}{extra}"


class Tuner(Observer):
    """Measures a supervised engine's steps and changes its plan where that is worth it; rank 0 of all decides.

    It comes behind the supervision of the engine, so that a step at which all stop was counted and written down.
    """

    def __init__(self, engine: SupervisedEngine, request: Request | None, before: Tuning, run_directory: Path) -> None:
        """`request` is what the plan was made for; only rank 0 needs it."""
        self._engine, self._request, self._before = engine, request, before
        self._run_directory = run_directory
        self._start_seconds: float | None = None
        self._until = MEASURED_STEPS
        self._seconds: list[float] = []
        self._steps = 0
        self._is_over = False
        self._step_began = time.perf_counter()

    def step_ended(self) -> None:
        """Note the step's time; after enough of them, decide.

        Raises:
            Stopped: all ranks have saved, and end to start again under another plan.
        """
        if self._is_over:
            return
        now = time.perf_counter()
        self._steps += 1
        if self._start_seconds is None:
            self._start_seconds = time.time() - psutil.Process().create_time()
        if self._steps > SETTLING_STEPS:
            self._seconds.append(now - self._step_began)
        if len(self._seconds) >= self._until:
            self._look()
        self._step_began = time.perf_counter()

    def _look(self) -> None:
        verdict = on_rank_zero(self._verdict)
        if verdict == "more":
            self._until *= 2
            return
        self._is_over = True
        if verdict == "switch":
            stop_here(self._engine, "switch")

    def _verdict(self) -> str:
        """Return whether `more` steps are to be measured, the plan `stays`, or all ranks `switch`."""
        if sum(self._seconds) < MEASURED_SECONDS and self._until < LONGEST:
            return "more"
        seconds, request = statistics.median(self._seconds), self._request
        assert request is not None, "rank 0 has the request"
        supervision = self._engine.supervision
        assert supervision is not None, "only supervised engines are tuned"
        if why := supervision.unsaveable:
            notice(f"not tuned: {why}", stream="stdout")
            return "stays"
        try:
            decision = decide(self._engine.plan, seconds, self._before, request, self._start_seconds or 0.0)
            decision.tuning.save(self._run_directory)
        except (DsplanError, OSError) as problem:
            notice(f"not tuned: {problem}", stream="stdout")
            return "stays"
        if decision.why:
            notice(decision.why, stream="stdout")
        return "switch" if decision.switches else "stays"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """The tuning of a model, from before a strategy takes it apart."""

    run_directory: Path
    before: Tuning
    """What earlier attempts of the run measured."""
    request: Request | None
    """The plan was made for it; only rank 0 has it."""

    def watch(self, engine: SupervisedEngine) -> None:
        """Let the engine be tuned, where a supervisor starts it again."""
        if engine.supervision is not None:
            engine.observers.append(Tuner(engine, self.request, self.before, self.run_directory))


def prepare_tuning(
    model: nn.Module, options: PlanningOptions, environment: Environment, run_directory: Path
) -> Prospect | None:
    """Return what to tune with, or None if nothing is to be tuned (any more). Every rank calls this together.

    Raises:
        UnknownName, CannotRun, ContradictoryRequest: what was asked for cannot be planned.
    """
    state = current()
    if not state.tunes:
        return None
    if options.training_data is None:
        if environment.is_main:
            notice("--tune changes how batches are cut: hand training_data= to dsplan.initialize", stream="stdout")
        return None
    before = on_rank_zero(lambda: _before(run_directory, state))
    if before.is_over:
        return None
    measured = machine_rates(environment.device)
    request = live_request(model, options, environment, measured) if environment.is_main else None
    return Prospect(run_directory=run_directory, before=before, request=request)


def _before(run_directory: Path, state: ResumeState) -> Tuning:
    """Return what was measured with as many ranks as there are now."""
    tuning = Tuning.load(run_directory)
    if tuning is None or tuning.following is None:
        return Tuning()
    ranks = plan_from_dict(tuning.following).configuration.world_size
    return tuning if ranks == state.ranks else Tuning()
