"""How far step times are from what is predicted, by kind of plan, and what a calibration takes away from that.

`python scripts/calibration_spread.py` works the figures out from the shipped measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from planner.calibration.calibration import Calibration
from planner.factors import Factors
from planner.job import Job
from planner.timing import step_time

Kind = Literal["node", "nodes", "model parallel", "offload", "cpu", "unmeasured"]

NINE_OF_TEN = 1.645
"""Standard deviations on either side of the middle that hold nine of ten draws of a normal distribution."""
AGAIN = 0.03
"""The logarithmic spread of the same run made again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Logarithmic spreads of measured over predicted step times, a ninth decile over NINE_OF_TEN.

    `outside` of hardware and code that nothing was fitted to, `inside` what is left once the factors of the same
    hardware and code are fitted, over `rows` rows.
    """

    outside: float
    inside: float
    rows: int


SPREADS: Mapping[Kind, Spread] = {
    "node": Spread(outside=0.15, inside=0.08, rows=0),
    "nodes": Spread(outside=0.2, inside=0.1, rows=0),
    "model parallel": Spread(outside=0.2, inside=0.1, rows=0),
    "offload": Spread(outside=0.4, inside=0.2, rows=0),
    "cpu": Spread(outside=0.4, inside=0.15, rows=0),
    "unmeasured": Spread(outside=0.4, inside=0.2, rows=0),
}

FACTOR_SPREADS: Mapping[str, float] = {
    "compute": 0.15,
    "attention": 0.2,
    "memory": 0.2,
    "intra_link": 0.3,
    "inter_link": 0.3,
    "host_link": 0.3,
    "cpu_optimizer": 0.3,
    "launch": 0.3,
}
"""How much the factors differ from one hardware and code to the next: standard deviations of their logarithms."""

MEASURED_ARCHITECTURES = frozenset({"volta", "ampere", "hopper"})
"""Of devices of other architectures nothing published was compared."""

_STEP = 1e-3


def kind_of(job: Job) -> Kind:
    """The kind of plan, as far as errors go."""
    configuration, cluster = job.configuration, job.cluster
    if cluster.device.is_cpu:
        return "cpu"
    if cluster.device.architecture not in MEASURED_ARCHITECTURES:
        return "unmeasured"
    if configuration.offload != "none":
        return "offload"
    if configuration.tp * configuration.pp > 1:
        return "model parallel"
    return "node" if cluster.nodes == 1 else "nodes"


def interval(job: Job, seconds: float, calibration: Calibration | None) -> tuple[float, float]:
    """Between which seconds nine of ten runs of a job should lie that is predicted to take `seconds`."""
    spread = SPREADS[kind_of(job)]
    share = 1.0 if calibration is None else math.sqrt(_left(job, spread.inside, calibration))
    half = NINE_OF_TEN * spread.outside * share
    return seconds * math.exp(-half), seconds * math.exp(half)


def _left(job: Job, inside: float, calibration: Calibration) -> float:
    """The share of the variance that calibration leaves: of the noise within one hardware and code, and of what the
    factors may be. Models that were not among its runs keep the usual noise."""
    gradient = {name: slope(job, name) for name in FACTOR_SPREADS}
    wide = {name: (spread * gradient[name]) ** 2 for name, spread in FACTOR_SPREADS.items()}
    before = inside**2 + sum(wide.values())
    seen = job.facts.name in calibration.models
    noise = inside * (calibration.spread if seen else max(1.0, calibration.spread))
    unfitted = sum(variance for name, variance in wide.items() if name not in calibration.names)
    return (noise**2 + calibration.variance(gradient) + unfitted) / before


def slope(job: Job, name: str, price: Callable[[Job], float] | None = None) -> float:
    """How the logarithm of the step time changes with the logarithm of a factor."""
    seconds = price or (lambda one: step_time(one).step_seconds)
    values = asdict(job.cluster.factors)
    moved = Factors(**{**values, name: values[name] * math.exp(_STEP)})
    there = seconds(replace(job, cluster=replace(job.cluster, factors=moved)))
    return math.log(there / seconds(job)) / _STEP
