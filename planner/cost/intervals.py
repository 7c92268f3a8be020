"""Widths around predicted times and memory, as published runs ask for that nothing was fitted to.

`scripts/fit/intervals.py` works `intervals.json` out: how far a run of each regime is off, joined with a factor of its
code base, and with one where hardware or size go beyond what was published. Every figure stands there with the runs and
the publications behind it. A code base without any has a factor as wide as code bases differ from each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from hardware_db.records import dataclass
from planner.cost.code_bases import of_any_year
from planner.models.facts import ModelFacts
from planner.types.job import Job, Workload
from planner.vocabulary import SCALED_PRECISIONS

Regime = Literal["plain", "8 bits", "small batch", "adapters", "experts", "offload"]
REGIMES: tuple[Regime, ...] = ("plain", "8 bits", "small batch", "adapters", "experts", "offload")
Beyond = Literal["device", "larger model", "smaller model", "more GPUs", "fewer GPUs"]
BEYOND: tuple[Beyond, ...] = ("device", "larger model", "smaller model", "more GPUs", "fewer GPUs")

SMALL_BATCH = 2048
"""Tokens of a micro-batch on one rank, below which the host that launches kernels decides the step rather than the
device: a host takes 0.85 ms to launch a block of transformers (`block_host_seconds`), in which an A100 multiplies one
of width 2,048 with that many tokens (24 operations a token and squared width, at 77 % of 312 TFLOP/s)."""

ANY_OTHER = "any other"
"""The row of code bases, and of regimes, that nothing was published of."""

TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stratum:
    """A job as far as published runs tell jobs apart by their errors."""

    regime: Regime
    """Its kind of work, the first that fits of offload, adapters, experts, small batch, 8 bits."""
    code: str
    """Code base, of any year."""
    architecture: str
    """Of its devices, as in the catalogue of devices."""
    parameters: int
    """Of the model, adapters included."""
    gpus: int
    """Devices in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Width:
    """Width of one regime, with what is behind it."""

    width: float
    """Logarithm of measured over predicted that nine of ten runs stay within."""
    runs: int
    publications: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """Published runs of a code base."""

    factor: float
    """Joined with the width of a regime."""
    runs: int
    publications: int
    parameters: tuple[int, int]
    """Of the smallest and the largest model."""
    gpus: tuple[int, int]
    """Fewest and most devices."""

    def beyond(self, stratum: Stratum) -> dict[Beyond, float]:
        """Return how many times a job goes beyond the published runs in size, where it does."""
        ratios: dict[Beyond, float] = {
            "larger model": stratum.parameters / self.parameters[1],
            "smaller model": self.parameters[0] / max(1, stratum.parameters),
            "more GPUs": stratum.gpus / self.gpus[1],
            "fewer GPUs": self.gpus[0] / stratum.gpus,
        }
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """Widening of what goes beyond the published runs."""

    wider: float
    """Joined with the width."""
    ratio: float
    """How many times larger the sizes were that it was found for; less far beyond, it counts in proportion to the
    logarithm. 1 for devices, which are seen or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Widths of one figure: of times the parts are multiplied, of memory they are added."""

    joins: Literal["product", "sum"]
    regimes: Mapping[str, Width]
    codes: Mapping[str, Published]
    like: Mapping[str, str]
    """Code bases that run the modules of another, whose runs count where they have none of their own."""
    devices: Mapping[str, int]
    """Publications by architecture, of those that enough were published of."""
    beyond: Mapping[str, Extrapolation]
    """For where a job goes beyond what was published."""

    def of(self, stratum: Stratum) -> float:
        """Return the logarithm of measured over predicted that nine of ten such runs stay within.

        Of several ways to go beyond what was published the widest counts.
        """
        width, published = self.regime(stratum.regime).width, self.published(stratum.code)
        ratios = published.beyond(stratum) | ({} if stratum.architecture in self.devices else {"device": math.inf})
        wider = [self._wider(self.beyond[name], ratio) for name, ratio in ratios.items()]
        if self.joins == "sum":
            return width + published.factor + max([0.0, *wider])
        return width * published.factor * max([1.0, *wider])

    def _wider(self, extrapolation: Extrapolation, ratio: float) -> float:
        share = 1.0 if ratio >= extrapolation.ratio else math.log(ratio) / math.log(extrapolation.ratio)
        return extrapolation.wider * share if self.joins == "sum" else extrapolation.wider**share

    def widest(self, regimes: Iterable[str], code: str) -> float:
        """Return what `of` never goes beyond for jobs of these regimes."""
        width = max(self.regime(name).width for name in regimes)
        return width * self.published(code).factor * max(1.0, *(each.wider for each in self.beyond.values()))

    def regime(self, name: str) -> Width:
        """Return the width of a regime; of one that too little was published of, that of all together."""
        return self.regimes.get(name) or self.regimes[ANY_OTHER]

    def published(self, code: str) -> Published:
        """Return the published runs of a code base or one that runs the same modules; if neither has any, of all."""
        return self.codes.get(code) or self.codes.get(self.like.get(code, "")) or self.codes[ANY_OTHER]


def stratum_of(job: Job) -> Stratum:
    """Return a job as far as published runs tell jobs apart."""
    return Stratum(
        regime=_regime(job),
        code=of_any_year(job.workload.code),
        architecture=job.cluster.device.architecture,
        parameters=job.facts.parameters,
        gpus=job.configuration.world_size,
    )


def _regime(job: Job) -> Regime:
    if job.configuration.offload != "none":
        return "offload"
    whole = _regime_of_work(job.facts, job.workload)
    is_short = job.tokens_per_micro_batch < SMALL_BATCH
    return "small batch" if is_short and whole in ("plain", "8 bits") else whole


def _regime_of_work(facts: ModelFacts, workload: Workload) -> Regime:
    """Return the regime that work has on the devices in micro-batches that are not small."""
    regimes: tuple[tuple[Regime, bool], ...] = (
        ("adapters", workload.method != "full"),
        ("experts", facts.is_moe),
        ("8 bits", workload.precision in SCALED_PRECISIONS),
    )
    return next((name for name, is_so in regimes if is_so), "plain")


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Widths]:
    return read_tables(TABLE)


def read_tables(path: Path) -> Mapping[str, Widths]:
    """Return the widths that a file holds, as `scripts/fit/intervals.py` wrote it."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return {name: _widths(document[name]) for name in ("time", "memory", "room")}


def _widths(table: Mapping[str, Any]) -> Widths:
    parts: dict[str, Callable[..., Any]] = {"regimes": Width, "codes": Published, "beyond": Extrapolation}
    rows: dict[str, Mapping[str, Any]] = {
        part: {
            name: kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
            for name, row in table[part].items()
        }
        for part, kind in parts.items()
    }
    return Widths(joins=table["joins"], **rows, like=table["like"], devices=table["devices"])


def step_half_width(job: Job) -> float:
    """Return the logarithm of a factor: nine of ten steps lie between the predicted time over it and times it."""
    return _tables()["time"].of(stratum_of(job))


def widest_half_width(facts: ModelFacts, workload: Workload) -> float:
    """Return what `step_half_width` never goes beyond, whatever the configuration."""
    regime = _regime_of_work(facts, workload)
    regimes = [regime, "offload", *(["small batch"] if regime in ("plain", "8 bits") else [])]
    return _tables()["time"].widest(regimes, of_any_year(workload.code))


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """Over what a job is said to need, shares of it that nine of ten runs stay below."""

    crowded: float
    """Of runs whose allocator has no cache left to give back."""
    roomy: float
    """Of all runs, what is cached while there is room included."""


def memory_headroom(job: Job) -> Headroom:
    """Return how far over what it is said to need runs of a job go."""
    stratum, tables = stratum_of(job), _tables()
    crowded, roomy = (math.exp(max(0.0, tables[name].of(stratum))) - 1 for name in ("room", "memory"))
    return Headroom(crowded=crowded, roomy=max(crowded, roomy))
