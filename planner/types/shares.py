"""Shares of a step where ranks are unequally fast: samples of each data-parallel rank, blocks of each pipeline stage.

Texts name ranks in order, those that are alike together: `3x8,1x4` are three ranks with 8 samples and one with 4, or
three stages of 8 blocks and one of 4.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby

from planner.errors import ContradictoryRequest

Sizes = tuple[tuple[int, int], ...]
"""Ranks in order, those that are alike together: how many, and samples of each."""
Rates = Sequence[tuple[int, float]]
"""The same with how fast each is; only ratios count."""

MOST_STAGES = 4096
"""Stages of a pipeline that a text may name: more than any model has blocks."""

_PART = re.compile(r"(?:([1-9][0-9]{0,6})x)?([0-9]{1,9}(?:\.[0-9]{1,9})?)")


def read_sizes(text: str) -> Sizes:
    """Return the samples that a text names.

    Raises:
        ContradictoryRequest: it is no such text, or a rank has no sample.
    """
    parts = tuple(_read(text, "micro_batches", "rank", "3x8,1x4"))
    if any(size < 1 or size != int(size) for _, size in parts):
        raise ContradictoryRequest(f"micro_batches {text!r}: every rank has a whole number of samples, at least 1")
    return tuple((ranks, int(size)) for ranks, size in parts)


@lru_cache(maxsize=256)
def read_layers(text: str) -> tuple[int, ...]:
    """Return the blocks of each stage that a text names, at most `MOST_STAGES` of them.

    Raises:
        ContradictoryRequest: it is no such text, or a stage has no block.
    """
    parts = tuple(_read(text, "layers_per_stage", "stage", "3x8,1x4"))
    if any(layers < 1 or layers != int(layers) for _, layers in parts):
        raise ContradictoryRequest(f"layers_per_stage {text!r}: every stage has a whole number of blocks, at least 1")
    if sum(stages for stages, _ in parts) > MOST_STAGES:
        raise ContradictoryRequest(f"layers_per_stage {text!r}: is of more than {MOST_STAGES:,} stages")
    return tuple(int(layers) for stages, layers in parts for _ in range(stages))


def read_rates(text: str) -> tuple[tuple[int, float], ...]:
    """Return the rates that a text names.

    Raises:
        ContradictoryRequest: it is no such text, or a rank has no rate.
    """
    parts = tuple(_read(text, "rates", "rank", "3x1,1x0.5"))
    if any(rate <= 0 for _, rate in parts):
        raise ContradictoryRequest(f"rates {text!r}: every rank has a rate above 0")
    return parts


def _read(text: str, what: str, each: str, example: str) -> Iterator[tuple[int, float]]:
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ContradictoryRequest(f"{what} {text!r}: does not say what each {each} has; write it as {example}")
        yield int(match[1] or 1), float(match[2])


def write_sizes(sizes: Iterable[tuple[int, int]]) -> str:
    """Return the text that `read_sizes` reads."""
    alike = groupby((pair for pair in sizes if pair[0]), key=lambda pair: pair[1])
    return ",".join(f"{sum(ranks for ranks, _ in group)}x{size}" for size, group in alike)


def total(sizes: Iterable[tuple[int, float]]) -> float:
    """Return the sum over all ranks."""
    return sum(ranks * size for ranks, size in sizes)


def split_by_rate(samples: int, rates: Rates) -> tuple[Sizes, ...] | None:
    """Return the sizes of each group of ranks, so that the last rank is ready soonest.

    That is where the largest samples / rate is the least. Every rank has one sample at least; None where there are
    fewer samples than ranks. Ranks of a group differ by at most one sample, those with more of them first.
    """
    whole = total(rates)
    if samples < sum(ranks for ranks, _ in rates):
        return None
    least = [max(1, math.floor(samples * rate / whole)) for _, rate in rates]
    left = samples - sum(ranks * size for (ranks, _), size in zip(rates, least, strict=True))
    while left < 0:  # one sample was more than the share of some
        slowest = max((g for g, size in enumerate(least) if size > 1), key=lambda g: least[g] / rates[g][1])
        least[slowest] -= 1
        left += rates[slowest][0]
    more = [0] * len(rates)
    ready = [((size + 1) / rate, group) for group, ((_, rate), size) in enumerate(zip(rates, least, strict=True))]
    heapq.heapify(ready)
    while left:
        _, group = heapq.heappop(ready)
        ranks, rate = rates[group]
        taken = min(left, ranks - more[group])
        more[group] += taken
        left -= taken
        if more[group] == ranks:
            least[group], more[group] = least[group] + 1, 0
        heapq.heappush(ready, ((least[group] + 1) / rate, group))
    return tuple(
        tuple(pair for pair in ((extra, size + 1), (ranks - extra, size)) if pair[0])
        for (ranks, _), size, extra in zip(rates, least, more, strict=True)
    )
