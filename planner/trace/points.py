"""Points: sizes of models and batches at which the moments of a step are weighed against each other."""

from __future__ import annotations

import functools
import itertools
import random

from planner.memory.dimensions import Dimensions, model_dimensions
from planner.models.catalogue import models

_BATCHES = tuple(itertools.product((1.0, 4.0, 16.0), (128.0, 1024.0, 4096.0, 32768.0)))
_BESIDE = 40
_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


@functools.cache
def plausible_points(model_type: str) -> tuple[Dimensions, ...]:
    """The catalogue's models of a type with batches from one short sample to many long ones, and models like them with
    every size changed by up to two times."""
    rows = [model_dimensions(facts) for facts in models() if facts.model_type == model_type]
    few = rows[:: max(len(rows) // 6, 1)]
    chance = random.Random(0)
    changed = [
        {name: size * chance.choice(_FACTORS) for name, size in chance.choice(rows).items()} for _ in range(_BESIDE)
    ]
    real = [row | {"b": samples, "s": length, "t": length} for row in few for samples, length in _BATCHES]
    return tuple(real + [row | dict(zip(("b", "s", "t"), _batch(chance), strict=True)) for row in changed])


def _batch(chance: random.Random) -> tuple[float, float, float]:
    samples, length = chance.choice(_BATCHES)
    return samples, length, chance.choice((length, 197.0, 1500.0))
