"""Experience: what the database knows of the hardware and the work of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.calibration.calibration import Calibration
from planner.calibration.spread import interval
from planner.job import Job
from planner.plan import Configuration, MemoryEstimate, StepTime
from planner.shortage import Shortage
from planner.timing import step_time

if TYPE_CHECKING:
    from planner.calibration.known import KnownRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """The calibration of hardware like this, whose factors the cluster has already, the runs that this machine has
    made of the same work, and those that ran out of memory."""

    calibration: Calibration | None = None
    known: Mapping[Configuration, KnownRun] = field(default_factory=dict)
    shortages: tuple[Shortage, ...] = ()
    # Not an argument: a copy with other runs must work its ratios out anew.
    _ratios: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def expected(self, job: Job) -> StepTime:
        """What a job takes that has not run here: as predicted, times what `ratio` says."""
        predicted = step_time(job)
        ratio = self.ratio(job) if self.known else 1.0
        return predicted if ratio == 1.0 else predicted.scaled(ratio)

    def ratio(self, job: Job) -> float:
        """How much longer than predicted the nearest runs of this work took, as a geometric mean: those of the same
        strategy and offload, else all on as many ranks, if those took longer; 1 without any.

        A plan that was run must not lose to its neighbours because the model was too hopeful about all of them; nor to
        another strategy because it was itself better than predicted.
        """
        configuration = job.configuration
        key = (configuration.strategy, configuration.offload, configuration.tp * configuration.pp > 1)
        place = (*key, configuration.world_size)
        if place not in self._ratios:
            runs = {one: run for one, run in self.known.items() if one.world_size == configuration.world_size}
            near = {one: run for one, run in runs.items() if (one.strategy, one.offload, one.tp * one.pp > 1) == key}
            logs = [
                math.log(run.step_seconds / step_time(replace(job, configuration=one)).step_seconds)
                for one, run in (near or runs).items()
            ]
            ratio = math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
            self._ratios[place] = ratio if near else max(1.0, ratio)
        return self._ratios[place]

    def shortage(self, job: Job, memory: MemoryEstimate) -> Shortage | None:
        """What rules a job with this memory out, because it ran out of memory; None where nothing does."""
        return next((one for one in self.shortages if one.rules_out(job, memory)), None)

    def time_of(self, job: Job, predicted: StepTime) -> StepTime:
        """What the job takes: as measured where it ran before, else as predicted, with the interval either has."""
        run = self.known.get(job.configuration)
        if run is not None:
            return run.answer(predicted)
        low, high = interval(job, predicted.step_seconds, self.calibration)
        return replace(predicted, step_seconds_low=low, step_seconds_high=high)


NO_EXPERIENCE = Experience()
