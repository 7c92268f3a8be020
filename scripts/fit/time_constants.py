"""The free constants of the time model, what is known of them without any published run, and how they are fitted.

Each is a rate over the one that the model ships: of a device's architecture (products, attention, memory), of a link
inside nodes or between them, of the host. The expectation that a fit shrinks to never comes from published steps, or a
source that is left out would speak through it: ceilings are those of kernels measured alone, or of a large product in
general; links are the catalogue's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.calibration.fit import Fit, Noise, Prior, fit
from planner.cost.timing import step_time
from planner.cost.timing.efficiency import ceilings
from planner.types.cluster import Cluster, Factors
from scripts.fit.published_rows import PublishedRun

PRODUCTS_EXPECTED: Mapping[str, float] = {"volta": 0.75, "ampere": 0.77, "hopper": 0.75, "blackwell": 0.50}
"""Share of the dense peak that large 16-bit products are expected to reach: kernels of A100-PCIe and B200 measured
alone (gemm_efficiency.csv), and three quarters where none was. An architecture that is not here keeps what is shipped,
which no run was fitted to."""

ATTENTION_EXPECTED: Mapping[str, float] = {"volta": 0.50, "ampere": 0.53, "hopper": 0.40, "blackwell": 0.40}
"""The same of fused attention: kernels of A100-PCIe and B200 (attention_efficiency.csv); Hopper is taken for B200."""

SPREADS: Mapping[str, float] = {
    "compute": 0.15,
    "attention": 0.25,
    "memory": 0.10,
    "intra_link": 0.15,
    "inter_link": 0.35,
    "launch": 0.30,
}
"""Standard deviation of each constant's logarithm before any step is seen, by kind: memory and the links inside nodes
were measured by themselves, what leaves a node depends on its site."""

NOISE = Noise(spread=0.08, rows=1e6)
"""Steps of one code base scatter by some 8 % around a fitted model. Held there: rows that count for less than one would
otherwise make it look smaller."""

ROWS_THAT_COUNT = 10
"""A table of any length weighs like this many independent runs: its rows share one machine and one code base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One free constant: the factor it is, and of which architecture or link (empty: of every run)."""

    kind: str
    of: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.of}".strip()


def constants_of(run: PublishedRun) -> tuple[Constant, ...]:
    """The constants that a run depends on."""
    cluster = run.job.cluster
    kind = architecture(cluster)
    constants = [Constant(kind=name, of=kind) for name in ("compute", "attention", "memory")]
    if cluster.intra_link is not None and cluster.gpus > 1:
        constants.append(Constant(kind="intra_link", of=cluster.intra_link.name))
    if cluster.inter_link is not None and cluster.nodes > 1:
        constants.append(Constant(kind="inter_link", of=""))
    return (*constants, Constant(kind="launch", of=""))


def architecture(cluster: Cluster) -> str:
    """Architecture and form of a cluster's devices, as GEMM_CEILING tells them apart."""
    return f"{cluster.device.architecture} {cluster.device.form}".strip()


def expected_factors(cluster: Cluster) -> Factors:
    """Return what turns the shipped rates of products and attention into the expected ones."""
    kind = cluster.device.architecture
    if kind not in PRODUCTS_EXPECTED:
        return Factors()
    products, attention = ceilings(cluster.device)
    return Factors(compute=PRODUCTS_EXPECTED[kind] / products, attention=ATTENTION_EXPECTED[kind] / attention)


class Model:
    """The time model over a set of runs, as a function of the logarithms of its constants.

    A run is priced again only where one of its own constants has moved.
    """

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.runs = tuple(runs)
        self.constants = tuple(sorted({c for run in runs for c in constants_of(run)}, key=lambda c: (c.kind, c.of)))
        places = {constant: index for index, constant in enumerate(self.constants)}
        self._places = [tuple(places[constant] for constant in constants_of(run)) for run in runs]
        self._seconds: list[dict[tuple[float, ...], float]] = [{} for _ in runs]
        self._clusters: dict[tuple[int, tuple[float, ...]], Cluster] = {}

    def seconds(self, values: Sequence[float]) -> list[float]:
        """Predicted seconds of each run."""
        return [self._priced(index, values) for index in range(len(self.runs))]

    def _priced(self, index: int, values: Sequence[float]) -> float:
        own = tuple(values[constant] for constant in self._places[index])
        priced = self._seconds[index]
        if own not in priced:
            if len(priced) > 2 * len(self.constants):
                priced.clear()
            run = self.runs[index]
            job = replace(run.job, cluster=self._cluster(run, own))
            priced[own] = step_time(job).step_seconds
        return priced[own]

    def _cluster(self, run: PublishedRun, own: tuple[float, ...]) -> Cluster:
        cluster = run.job.cluster
        expected = expected_factors(cluster)
        moves = {c.kind: math.exp(value) for c, value in zip(constants_of(run), own, strict=True)}
        changed = {kind: move * float(getattr(expected, kind)) for kind, move in moves.items()}
        return replace(cluster, factors=replace(expected, **changed))


SHIPPED_SPREADS: Mapping[str, float] = {**dict.fromkeys(SPREADS, 1e-3), "compute": 0.15, "attention": 0.25}
"""What is shipped are ceilings of products and attention: the links stay the catalogue's, memory what was measured."""


def fitted(model: Model, spreads: Mapping[str, float] = SPREADS) -> Fit:
    """The constants that explain the runs of a model best, shrunk to what is expected of them."""
    rows = Counter(run.document for run in model.runs)
    weights = [math.sqrt(min(1.0, ROWS_THAT_COUNT / rows[run.document])) for run in model.runs]
    measured = [run.measured_seconds for run in model.runs]

    def residuals(values: Sequence[float]) -> list[float]:
        seconds = model.seconds(values)
        return [w * math.log(m / s) for w, m, s in zip(weights, measured, seconds, strict=True)]

    priors = [Prior(name=constant.name, spread=spreads[constant.kind]) for constant in model.constants]
    return fit(residuals, priors, NOISE)


def predicted(runs: Sequence[PublishedRun], constants: Fit) -> list[float]:
    """Seconds of runs under constants fitted on others; a constant that those others do not have stays as expected."""
    model = Model(runs)
    values = dict(zip(constants.names, constants.values, strict=True))
    return model.seconds([values.get(constant.name, 0.0) for constant in model.constants])
