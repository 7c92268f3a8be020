"""Known runs: a configuration that this machine has run before answers with what it measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hardware_db.measurement import CIRCUMSTANCES, Measurement
from planner.calibration.spread import AGAIN, NINE_OF_TEN
from planner.errors import DsplanError
from planner.plan import Configuration, StepTime
from planner.plan_io import configuration_from_dict

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
        middle = statistics.fmean(logs)
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
    for one in measurements:
        plan = one.plan
        if one.outcome != "completed" or not one.measured.step_seconds or not is_same_work(plan, inputs):
            continue
        try:
            configuration = configuration_from_dict(plan["plan"])
        except DsplanError:
            continue  # of a release that knew other words
        group = found.setdefault(configuration, [])
        if not group or group[0].fingerprint.versions == one.fingerprint.versions:
            group.append(one)
    return {configuration: _known(group) for configuration, group in found.items()}


def is_same_work(plan: Mapping[str, object], inputs: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether a stored plan is of the model, the devices and the work that a request's sections describe."""
    for name, wanted in inputs.items():
        section = plan.get(name)
        if not isinstance(section, Mapping):
            return False
        left_out = CIRCUMSTANCES[name] | (_NAMES if name == "model" else frozenset())
        if any(section.get(key) != value for key, value in wanted.items() if key not in left_out):
            return False
    return True


def _known(group: list[Measurement]) -> KnownRun:
    each = tuple(one.measured.step_seconds or 0.0 for one in group)
    return KnownRun(
        step_seconds=statistics.median(each),
        each=each,
        created_at=group[0].created_at,
        peak_allocated_bytes=group[0].measured.peak_allocated_bytes,
    )
