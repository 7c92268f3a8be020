"""Preference: which plans are simpler than others, and how far apart two predictions must be to be held different."""

from __future__ import annotations

from typing import Protocol

from planner import vocabulary as words

SPLIT_OR_WHOLE = 0.15
"""How far the ratio of two predicted step times is from the measured one, at the 90th percentile, where one plan splits
layers and the other does not: 943 published pairs in 46 groups, each publication left out of the fit
(`scripts/ratio_spread.py`). Most of what is wrong with the one prediction is wrong with the other too."""
NEVER_COMPARED = 0.2
"""The same where nothing published compares such pairs: a replica with shards, torch with DeepSpeed, a device that
keeps its states with one that offloads them. Then nothing is known to cancel, and two predictions, each off by 14 % at
the 90th percentile (docs/accuracy.md), are off against each other by the root of two of it."""


class Named(Protocol):
    """A shape or a configuration, as far as names and simplicity go."""

    @property
    def strategy(self) -> words.Strategy: ...
    @property
    def offload(self) -> words.Offload: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...


def simplicity(plan: Named) -> tuple[int, ...]:
    """Smaller is simpler: whole layers before split ones, all on the device before offload, a replica before torch's
    shards, and those before ZeRO, which asks for one more library."""
    sharded = 2 if plan.strategy in words.ZERO_STAGES else int(plan.strategy in words.FSDP_STRATEGIES)
    return plan.tp * plan.pp > 1, words.OFFLOADS.index(plan.offload), sharded


def told_apart_from(one: Named, other: Named) -> float:
    """From what share of a step time on one plan is held slower than another. Plans that are equally simple go by their
    times alone."""
    if simplicity(one) == simplicity(other):
        return 0.0
    only_split = simplicity(one)[1:] == simplicity(other)[1:]
    return SPLIT_OR_WHOLE if only_split else NEVER_COMPARED
