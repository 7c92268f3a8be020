"""Experience: what the database knows of the hardware and the work of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.calibration.calibration import Calibration
from planner.calibration.spread import interval
from planner.job import Job
from planner.plan import Configuration, StepTime

if TYPE_CHECKING:
    from planner.calibration.known import KnownRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """The calibration of hardware like this, whose factors the cluster has already, and the runs that this machine has
    made of the same work."""

    calibration: Calibration | None = None
    known: Mapping[Configuration, KnownRun] = field(default_factory=dict)

    def time_of(self, job: Job, predicted: StepTime) -> StepTime:
        """What the job takes: as measured where it ran before, else as predicted, with the interval either has."""
        run = self.known.get(job.configuration)
        if run is not None:
            return run.answer(predicted)
        low, high = interval(job, predicted.step_seconds, self.calibration)
        return replace(predicted, step_seconds_low=low, step_seconds_high=high)


NO_EXPERIENCE = Experience()
