"""Spread of step times around predictions, and what a calibration takes away from it.

`scripts/fit/intervals.py` and `scripts/fit/calibration_spread.py` work the figures out from the published runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Literal

from hardware_db.records import dataclass
from planner.calibration.calibration import Calibration
from planner.cost.intervals import step_half_width
from planner.cost.timing import step_time
from planner.types.cluster import Factors
from planner.types.job import Job

Kind = Literal["node", "nodes", "model parallel", "offload", "cpu", "unmeasured cpu", "unmeasured"]

NINE_OF_TEN = 1.645
"""Standard deviations on either side of the middle that hold nine of ten draws of a normal distribution."""
AGAIN = 0.03
"""The logarithmic spread of the same run made again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Logarithmic spreads of measured over predicted step times, a ninth decile over NINE_OF_TEN.

    `outside` of hardware and code that nothing was fitted to; `inside` what is left of that where the same hardware and
    code is off as a whole by nothing any more.
    """

    outside: float
    inside: float


INSIDE: Mapping[Kind, float] = {
    "node": 0.062,
    "nodes": 0.053,
    "model parallel": 0.074,
    "offload": 0.074,
    "cpu": 0.14,
    "unmeasured cpu": 0.14,
    "unmeasured": 0.074,
}
"""Spread inside, by kind of plan: of 408 published runs of eight publications, each with the factors that fit it
(scripts/fit/calibration_spread.py). Offload and devices that nothing was fitted to are taken for the widest."""

OUTSIDE_OF_CPUS: Mapping[Kind, float] = {"cpu": 0.187, "unmeasured cpu": 0.70}
"""Spread outside of processors: those of 60 runs on one machine (scripts/measure/real_times.py), with the rates of
`dsplan bench` and of a first run together, which hold 95 % and 87 % of the runs, and without any rate. Of GPUs
`planner.cost.intervals` knows it."""

FACTOR_SPREADS: Mapping[str, float] = {
    "compute": 0.28,
    "attention": 0.15,
    "memory": 0.24,
    "intra_link": 0.26,
    "inter_link": 0.20,
    "host_link": 0.28,
    "cpu_optimizer": 0.28,
    "launch": 0.28,
}
"""How much the factors differ from one hardware and code to the next: standard deviations of their logarithms over
thirteen publications of every reading (scripts/fit/calibration_spread.py --all). No publication feels the last three:
they are taken to differ as much as the widest."""

MEASURED_ARCHITECTURES = frozenset({"volta", "ampere", "hopper"})
"""Of devices of other architectures nothing published was compared."""

_STEP = 1e-3


def kind_of(job: Job) -> Kind:
    """Return the kind of plan, as far as errors go."""
    configuration, cluster = job.configuration, job.cluster
    if cluster.device.is_cpu:
        return "unmeasured cpu" if cluster.rates.matmul is None else "cpu"
    if cluster.device.architecture not in MEASURED_ARCHITECTURES:
        return "unmeasured"
    if configuration.offload != "none":
        return "offload"
    if configuration.splits_model:
        return "model parallel"
    return "node" if cluster.nodes == 1 else "nodes"


def spread_of(job: Job) -> Spread:
    """Return how far a job is off, with and without runs of its own."""
    kind = kind_of(job)
    inside = INSIDE[kind]
    outside = OUTSIDE_OF_CPUS.get(kind) or step_half_width(job) / NINE_OF_TEN
    return Spread(outside=max(outside, inside), inside=inside)


def interval(job: Job, seconds: float, calibration: Calibration | None) -> tuple[float, float]:
    """Between which seconds nine of ten runs of a job should lie that is predicted to take `seconds`."""
    spread = spread_of(job)
    half = NINE_OF_TEN * (spread.outside if calibration is None else _left(job, spread, calibration))
    return seconds * math.exp(-half), seconds * math.exp(half)


def _left(job: Job, spread: Spread, calibration: Calibration) -> float:
    """Return the spread that calibration leaves, never more than before.

    It is that of the runs of one hardware and code, and of what the factors may be. Models that were not among its runs
    keep the usual noise. Runs that scatter widely (made while other work ran) leave at most what is known of a machine
    that never ran anything.
    """
    gradient = slopes(job)
    unfitted = sum((spread * gradient[name]) ** 2 for name, spread in FACTOR_SPREADS.items())
    unfitted -= sum((FACTOR_SPREADS[name] * gradient[name]) ** 2 for name in calibration.names)
    seen = job.facts.name in calibration.models
    noise = spread.inside * (calibration.spread if seen else max(1.0, calibration.spread))
    common = min(calibration.variance(gradient) + max(0.0, unfitted), spread.outside**2 - spread.inside**2)
    unknown = OUTSIDE_OF_CPUS["unmeasured cpu"] if job.cluster.device.is_cpu else spread.outside
    return min(math.sqrt(noise**2 + common), unknown)


def slopes(job: Job, price: Callable[[Job], float] | None = None) -> dict[str, float]:
    """Return how the logarithm of the step time changes with the logarithm of each factor."""
    seconds = price or (lambda varied: step_time(varied).step_seconds)
    here, values = seconds(job), asdict(job.cluster.factors)
    logarithms = {}
    for name in FACTOR_SPREADS:
        if _unfelt(job, name):
            logarithms[name] = 0.0
            continue
        factors = Factors(**{**values, name: values[name] * math.exp(_STEP)})
        there = seconds(replace(job, cluster=replace(job.cluster, factors=factors)))
        logarithms[name] = math.log(there / here) / _STEP
    return logarithms


def _unfelt(job: Job, name: str) -> bool:
    """Return whether a job does nothing that a factor is about, which saves most of the work of hundreds of jobs."""
    if name == "inter_link":
        return job.cluster.nodes == 1
    is_on_host = job.configuration.offload != "none" or job.cluster.device.is_cpu
    return name in ("host_link", "cpu_optimizer") and not is_on_host
