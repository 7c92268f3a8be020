"""The database's knowledge of the hardware and the work of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from planner.calibration.calibration import Calibration
from planner.calibration.oom_history import OomRecord
from planner.calibration.spread import AGAIN, NINE_OF_TEN, interval
from planner.cost.timing import step_time
from planner.errors import DsplanError
from planner.types.job import Job
from planner.types.plan import Configuration, MemoryEstimate, StepTime
from planner.types.plan_io import configuration_from_dict

if TYPE_CHECKING:
    from hardware_db.measurement import Measurement

# Configurations that this machine has run before are answered from their measurements.


_NAMES = frozenset({"name", "family", "facts"})
"""Two names of one architecture are one model: a script calls it by its folder, a catalogue by its Hub id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRun:
    """Runs of one configuration: their median step in seconds, each run's own, the newest one's time and peak."""

    step_seconds: float
    each: tuple[float, ...]
    created_at: str
    peak_allocated_bytes: int | None = None

    def answer(self, predicted: StepTime) -> StepTime:
        """The measured step, its parts in the proportions that were predicted."""
        half = NINE_OF_TEN * self._spread()
        return replace(
            predicted.scaled(self.step_seconds / predicted.step_seconds),
            step_seconds=self.step_seconds,
            step_seconds_low=self.step_seconds * math.exp(-half),
            step_seconds_high=self.step_seconds * math.exp(half),
            predicted_step_seconds=predicted.step_seconds,
        )

    def sentence(self, predicted_seconds: float) -> str:
        """What was measured beside what would have been predicted, for a plan's notes."""
        runs = "once" if len(self.each) == 1 else f"{len(self.each)} times"
        error = predicted_seconds / self.step_seconds - 1
        return f"step time measured here {runs}, last on {self.created_at[:10]}; the model alone is {error:+.0%} off"

    def _spread(self) -> float:
        """The logarithmic spread of one more run: what is usual counts as one run more than there are."""
        logs = [math.log(seconds) for seconds in self.each]
        middle = math.fsum(logs) / len(logs)
        squares = AGAIN**2 + sum((value - middle) ** 2 for value in logs)
        return math.sqrt(squares / len(logs) * (1 + 1 / len(logs)))


def known_runs(
    measurements: Iterable[Measurement], inputs: Mapping[str, Mapping[str, object]]
) -> dict[Configuration, KnownRun]:
    """The completed runs of this model and work on devices like these, by configuration.

    `measurements` come newest first and are those of one machine; of each configuration only the runs with the versions
    of its newest one count. `inputs` are the sections model, cluster and workload of a plan for the request.
    """
    found: dict[Configuration, list[Measurement]] = {}
    for measurement in measurements:
        plan = measurement.plan
        if (
            measurement.outcome != "completed"
            or not measurement.measured.step_seconds
            or not is_same_work(plan, inputs)
        ):
            continue
        try:
            configuration = configuration_from_dict(plan["plan"])
        except DsplanError:
            continue  # of a release that knew other words
        group = found.setdefault(configuration, [])
        if not group or group[0].fingerprint.versions == measurement.fingerprint.versions:
            group.append(measurement)
    return {configuration: _known(group) for configuration, group in found.items()}


def is_same_work(plan: Mapping[str, object], inputs: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a stored plan is of the model, the devices and the work that a request's sections describe."""
    from hardware_db.measurement import CIRCUMSTANCES

    for name, wanted in inputs.items():
        section = plan.get(name)
        if not isinstance(section, Mapping):
            return False
        left_out = CIRCUMSTANCES[name] | (_NAMES if name == "model" else frozenset())
        if any(section.get(key) != value for key, value in wanted.items() if key not in left_out):
            return False
    return True


def _known(group: list[Measurement]) -> KnownRun:
    import statistics  # most questions are asked where nothing is known

    each = tuple(measurement.measured.step_seconds or 0.0 for measurement in group)
    return KnownRun(
        step_seconds=statistics.median(each),
        each=each,
        created_at=group[0].created_at,
        peak_allocated_bytes=group[0].measured.peak_allocated_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """The calibration of hardware like this, whose factors the cluster has already, the runs that this machine has
    made of the same work, and those that ran out of memory."""

    calibration: Calibration | None = None
    known: Mapping[Configuration, KnownRun] = field(default_factory=dict)
    oom_records: tuple[OomRecord, ...] = ()
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
            runs = {known: run for known, run in self.known.items() if known.world_size == configuration.world_size}
            near = {
                known: run
                for known, run in runs.items()
                if (known.strategy, known.offload, known.tp * known.pp > 1) == key
            }
            logs = [
                math.log(run.step_seconds / step_time(replace(job, configuration=known)).step_seconds)
                for known, run in (near or runs).items()
            ]
            ratio = math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
            self._ratios[place] = ratio if near else max(1.0, ratio)
        return self._ratios[place]

    def oom_record(self, job: Job, memory: MemoryEstimate) -> OomRecord | None:
        """Return the out-of-memory record that rules a job with this memory out, or None if none does."""
        return next((record for record in self.oom_records if record.rules_out(job, memory)), None)

    def time_of(self, job: Job, predicted: StepTime) -> StepTime:
        """What the job takes: as measured where it ran before, else as predicted, with the interval either has."""
        run = self.known.get(job.configuration)
        if run is not None:
            return run.answer(predicted)
        low, high = interval(job, predicted.step_seconds, self.calibration)
        return replace(predicted, step_seconds_low=low, step_seconds_high=high)


NO_EXPERIENCE = Experience()
