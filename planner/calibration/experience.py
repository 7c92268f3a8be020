"""The database's knowledge of the hardware and the work of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from hardware_db.records import dataclass
from planner.calibration.calibration import Calibration
from planner.calibration.oom_history import OomRecord
from planner.calibration.spread import AGAIN, FACTOR_SPREADS, INSIDE, NINE_OF_TEN, interval, kind_of
from planner.cost.timing import step_time
from planner.errors import DsplanError
from planner.types.job import Job, Sections
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
        """Return the measured step, its parts in the proportions that were predicted."""
        half = NINE_OF_TEN * self._spread()
        return replace(
            predicted.scaled(self.step_seconds / predicted.step_seconds),
            step_seconds=self.step_seconds,
            step_seconds_low=self.step_seconds * math.exp(-half),
            step_seconds_high=self.step_seconds * math.exp(half),
            predicted_step_seconds=predicted.step_seconds,
        )

    def sentence(self, predicted_seconds: float) -> str:
        """Return what was measured beside what would have been predicted, for a plan's notes."""
        runs = "once" if len(self.each) == 1 else f"{len(self.each)} times"
        error = predicted_seconds / self.step_seconds - 1
        size = f"{abs(error):.0%}"
        alone = "the same" if size == "0%" else f"{size} too {'much' if error > 0 else 'little'}"
        return f"step time measured here {runs}, last on {self.created_at[:10]}; the model alone predicts {alone}"

    def _spread(self) -> float:
        """Return the logarithmic spread of one more run: what is usual counts as one run more than there are."""
        logs = [math.log(seconds) for seconds in self.each]
        middle = math.fsum(logs) / len(logs)
        squares = AGAIN**2 + sum((value - middle) ** 2 for value in logs)
        return math.sqrt(squares / len(logs) * (1 + 1 / len(logs)))


def known_runs(measurements: Iterable[Measurement], inputs: Sections) -> dict[Configuration, KnownRun]:
    """Return the completed runs of this model and work on devices like these, by configuration.

    `measurements` come newest first and are those of one machine; of each configuration only the runs with the versions
    of its newest one count. `inputs` are the sections model, cluster and workload of a plan for the request.
    """
    same_work = SameWork(inputs)
    runs: dict[Configuration, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.outcome != "completed" or not measurement.measured.step_seconds:
            continue
        configuration = same_work.configuration(measurement)
        if configuration is None:
            continue
        group = runs.setdefault(configuration, [])
        if not group or group[0].fingerprint.versions == measurement.fingerprint.versions:
            group.append(measurement)
    return {configuration: _run_of(group) for configuration, group in runs.items()}


class SameWork:
    """Finds runs of the model, the devices and the work that a request's sections describe.

    Stored plans differ in what was predicted of them and in the memory that was free, and are alike in most else: a
    section is decoded once for all plans that have it.
    """

    def __init__(self, inputs: Sections) -> None:
        self._inputs: Mapping[str, Mapping[str, object]] = {
            "model": inputs["model"], "cluster": inputs["cluster"], "workload": inputs["workload"],
        }  # fmt: skip
        self._same: dict[tuple[str, bytes], bool] = {}
        self._configurations: dict[bytes, Configuration | None] = {}

    def configuration(self, measurement: Measurement) -> Configuration | None:
        """Return the configuration of a run of this work; None for another, and for one of unknown words."""
        sections = measurement.plan_sections
        if not all(self._is_same(name, sections.get(name)) for name in self._inputs):
            return None
        written = sections["plan"]
        if written not in self._configurations:
            try:
                self._configurations[written] = configuration_from_dict(json.loads(written))
            except DsplanError:
                self._configurations[written] = None  # of a release that knew other words
        return self._configurations[written]

    def _is_same(self, name: str, section: bytes | None) -> bool:
        if section is None:
            return False
        if (name, section) not in self._same:
            self._same[name, section] = self._agrees(name, json.loads(section))
        return self._same[name, section]

    def _agrees(self, name: str, stored: object) -> bool:
        from hardware_db.measurement import CIRCUMSTANCES

        left_out = CIRCUMSTANCES[name] | (_NAMES if name == "model" else frozenset())
        return isinstance(stored, dict) and all(
            stored.get(key) == value for key, value in self._inputs[name].items() if key not in left_out
        )


def _run_of(group: list[Measurement]) -> KnownRun:
    import statistics  # most questions are asked where nothing is known

    each = tuple(measurement.measured.step_seconds or 0.0 for measurement in group)
    return KnownRun(
        step_seconds=statistics.median(each),
        each=each,
        created_at=group[0].created_at,
        peak_allocated_bytes=group[0].measured.peak_allocated_bytes,
    )


Family = tuple[str, str, str, bool]
"""Backend, strategy, offload, and whether layers are split: what runs of one work are alike in."""


_ONE_ENGINE: Mapping[str, str] = {
    **dict.fromkeys(("zero1", "zero2"), "zero1 and zero2"),
    **dict.fromkeys(("fsdp", "fsdp-grad-op"), "fsdp and fsdp-grad-op"),
}


def family_of(configuration: Configuration) -> Family:
    """Return the family of plans whose runs say all of each other's step times, the engine's overhead included.

    ZeRO-1 and ZeRO-2 of one backend do the same but for when gradients are reduced, and are off by much the same
    (`scripts/fit/one_run.py`); torch's FSDP runs the same hooks whether it keeps weights until backward or not.
    """
    chosen = configuration
    strategy = _ONE_ENGINE.get(chosen.strategy, chosen.strategy)
    return chosen.backend, strategy, chosen.offload, chosen.splits_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Correction of a prediction by runs of the same work."""

    family: float = 1.0
    """What every part of a step takes over the model's time, as runs of the plan's own family did."""
    compute: float = 1.0
    """What computing takes over the model's time, as far as runs of other families have it in common with the plan."""

    def of(self, predicted: StepTime) -> StepTime:
        """Return the prediction, corrected."""
        if self.family != 1.0:
            return predicted.scaled(self.family)
        more = (self.compute - 1) * predicted.compute_seconds
        if not more:
            return predicted
        computing = predicted.compute_seconds + more
        return replace(predicted, step_seconds=predicted.step_seconds + more, compute_seconds=computing)

    def sentence(self) -> str:
        """For a plan's notes; empty where it changes nothing."""
        if self.family != 1.0:
            return f"the nearest runs made here took {self.family:.2f}x the model's time; counted so"
        if self.compute == 1.0:
            return ""
        return (
            f"runs of other strategies made here say that computing takes {self.compute:.2f}x the model's; counted so"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    """Experience of hardware like this: its calibration, whose factors the cluster has already, and its runs.

    `known_runs` are those that this machine has made of the same work, `oom_records` those that ran out of memory.
    """

    calibration: Calibration | None = None
    known_runs: Mapping[Configuration, KnownRun] = field(default_factory=dict)
    oom_records: tuple[OomRecord, ...] = ()
    # Not an argument: a copy with other runs must work its corrections out anew.
    _corrections: dict[tuple[Family, int], Correction] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def expected(self, job: Job) -> StepTime:
        """Return what a job takes that has not run here: as predicted, with what runs of the same work say of it."""
        return self.correction(job).of(step_time(job))

    def correction(self, job: Job) -> Correction:
        """Return what the runs of this work on as many ranks say.

        Those of the same family say all of the step, as a geometric mean; else those of others what they share with it,
        which is the machine's computing.

        Where that was measured or fitted, what a run took beyond its prediction is its own: its communication, and what
        its engine does. A plan is not held faster because another was better than predicted.
        """
        if not self.known_runs:
            return NO_CORRECTION
        family, ranks = family_of(job.configuration), job.configuration.world_size
        if (family, ranks) not in self._corrections:
            runs = {one: run for one, run in self.known_runs.items() if one.world_size == ranks}
            logs = [_beyond(job, one, run)[0] for one, run in runs.items() if family_of(one) == family]
            if logs:
                correction = Correction(family=math.exp(math.fsum(logs) / len(logs)))
            else:
                correction = Correction(compute=self._shared(job, runs))
            self._corrections[family, ranks] = correction
        return self._corrections[family, ranks]

    def _shared(self, job: Job, runs: Mapping[Configuration, KnownRun]) -> float:
        """Return what computing takes over the model's time, where nothing but these runs knows of the machine's.

        Communication and engines only add to a step, so it is at most what the run that is least beyond its prediction
        shows. Of that the most probable figure for machines that differ as they usually do and parts that scatter with
        heavy tails: a run that took far longer than predicted did so for reasons of its own.
        """
        is_fitted = self.calibration is not None and "compute" in self.calibration.names
        if not runs or is_fitted or job.cluster.rates.matmul is not None:
            return 1.0
        from planner.calibration.fit import TAILS, Noise, Prior, fit  # seldom needed: most machines have measured rates

        beyond, share = min(_beyond(job, one, run) for one, run in runs.items())
        scale = INSIDE[kind_of(job)]

        def residuals(values: Sequence[float]) -> list[float]:
            return [(beyond - math.log(1 + (math.exp(values[0]) - 1) * share)) / scale]

        prior = Prior(name="compute", spread=FACTOR_SPREADS["compute"])
        return max(1.0, math.exp(fit(residuals, [prior], Noise(spread=1 / TAILS)).values[0]))

    def oom_record(self, job: Job, memory: MemoryEstimate) -> OomRecord | None:
        """Return the out-of-memory record that rules a job with this memory out, or None if none does."""
        return next((record for record in self.oom_records if record.rules_out(job, memory)), None)

    def time_of(self, job: Job, predicted: StepTime) -> StepTime:
        """Return what the job takes: as measured where it ran before, else as predicted, with its interval."""
        run = self.known_runs.get(job.configuration)
        if run is not None:
            return run.answer(predicted)
        low, high = interval(job, predicted.step_seconds, self.calibration)
        return replace(predicted, step_seconds_low=low, step_seconds_high=high)


NO_CORRECTION = Correction()
NO_EXPERIENCE = Experience()


def _beyond(job: Job, configuration: Configuration, run: KnownRun) -> tuple[float, float]:
    """Return the logarithm of what a run took over its prediction, and the share of computing in that prediction."""
    predicted = step_time(replace(job, configuration=configuration))
    return math.log(run.step_seconds / predicted.step_seconds), predicted.compute_seconds / predicted.step_seconds
