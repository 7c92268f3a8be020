"""Exploration: the best configuration of a group of shapes, with as few of them priced as that takes.

A step's time is cheap to work out and needs no memory; memory is not cheap. So the shapes of a group are looked at in
the order of the best that each could be, until none that is left can beat what was found. That is exact as long as

- memory grows with the micro-batch, but for the last of them, which needs no gradients to be kept from one to the next;
- no micro-batch takes less work than the largest where it divides it (else TILES of it at least, or CACHES on a CPU),
  and none has a shorter bubble than the smallest;
- computing activations again takes time and no more memory;
- the same shape over fewer devices takes no less memory of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planner import vocabulary as words
from planner.candidate import Candidate
from planner.candidates import Shape
from planner.estimate import Priced, job_of, resident_bytes
from planner.ranking import Timed, order, worth
from planner.verdict import device_limit


class Family:
    """Candidates that differ only in the activations they compute again: none first, all last."""

    def __init__(self, members: Sequence[Candidate]) -> None:
        self._members = members
        self.gpus = members[0].request.cluster.gpus

    def bound(self) -> float:
        """Seconds that a step of any of them takes at least."""
        return self._members[0].bound()

    def is_hopeless(self) -> bool:
        """Whether weights, gradients and optimizer states alone do not fit."""
        first = self._members[0]
        job = job_of(first.request, first.configuration(0))
        return resident_bytes(job) > device_limit(job.workload, job.cluster)

    def fits_somehow(self) -> bool:
        return self._members[-1].fits_somehow()

    def misses(self) -> Iterator[Priced]:
        """What takes least memory, where nothing fits."""
        last = self._members[-1]
        return (last.priced(index) for index in last.ends())

    @property
    def split(self) -> tuple[object, ...]:
        """What it has in common with the same family over fewer devices."""
        shape = self._members[0].shape
        return shape.strategy, shape.tp, shape.pp, shape.offload, shape.offload_ratio, shape.sync_each_micro_batch

    def within(self, seconds: float) -> Iterator[Timed]:
        """Ever faster configurations that fit and take at most so many seconds a step."""
        for one in self._members:
            if one.bound() <= seconds:
                index = one.fastest_fitting(seconds)
                if index is not None:
                    seconds = one.seconds(index)
                    yield one.timed(index)
                elif one.seems_hopeless() and not self.fits_somehow():
                    return


def best(group: Sequence[Candidate], objective: words.Objective, limit: float = math.inf) -> Timed | None:
    """The best configuration of a group that fits and takes at most `limit` seconds a step; None without one."""
    found: Timed | None = None
    for timed_ in _smallest(group, limit) if objective == "memory" else _fast(group, objective, limit):
        if found is None or order(timed_, objective) < order(found, objective):
            found = timed_
    return found


def closest(group: Sequence[Candidate]) -> Priced | None:
    """The configuration that misses by least, of a group in which nothing fits."""
    misses = (priced for family in _families(group) for priced in family.misses())
    return min(misses, key=lambda priced: priced.judgement.pressure, default=None)


def _fast(group: Sequence[Candidate], objective: words.Objective, limit: float) -> Iterator[Timed]:
    """What was measured before, then ever better configurations by time or cost."""
    found = math.inf
    for known in _known(group):
        if known.time.step_seconds <= limit:
            found = min(found, worth(known, objective))
            yield known
    families = _with_devices_enough([family for family in _families(group) if not family.is_hopeless()])
    weights = [family.gpus if objective == "cost" else 1 for family in families]
    bounds = [family.bound() * weight for family, weight in zip(families, weights, strict=True)]
    for place in sorted(range(len(families)), key=bounds.__getitem__):
        if bounds[place] > found:
            return
        for one in families[place].within(min(found / weights[place], limit)):
            found = min(found, worth(one, objective))
            yield one


def _known(group: Iterable[Candidate]) -> Iterator[Timed]:
    """What this machine has run, with the times that it took."""
    for candidate in group:
        for index in range(len(candidate.micros)):
            if candidate.is_known(index) and candidate.fits(index):
                yield candidate.timed(index)


def _families(group: Iterable[Candidate]) -> list[Family]:
    families: dict[tuple[int, Shape], list[Candidate]] = {}
    for candidate in group:
        if candidate.micros:
            key = id(candidate.request), replace(candidate.shape, checkpointing="none")
            families.setdefault(key, []).append(candidate)
    members = (sorted(family, key=lambda one: _RECOMPUTED[one.shape.checkpointing]) for family in families.values())
    return [Family(family) for family in members]


_RECOMPUTED: dict[words.Checkpointing, int] = {"none": 0, "selective": 1, "full": 2}


def _with_devices_enough(families: Sequence[Family]) -> list[Family]:
    """Those that fit somehow, where the same family is there over several numbers of devices, the largest first."""
    alike: dict[tuple[object, ...], list[Family]] = {}
    for family in families:
        alike.setdefault(family.split, []).append(family)
    enough = []
    for fewer_and_fewer in alike.values():
        count = len(fewer_and_fewer)
        if count > 1:
            count = bisect_left(fewer_and_fewer, True, key=lambda family: not family.fits_somehow())
        enough += fewer_and_fewer[:count]
    return enough


def _smallest(group: Sequence[Candidate], limit: float) -> Iterator[Timed]:
    """Every configuration of the candidates that can do with least memory."""
    if limit < math.inf:
        yield from _in_time(group, limit)
        return
    needs = []
    for candidate in group:
        ends = (candidate.priced(index) for index in candidate.ends() if candidate.fits(index))
        used = [priced.memory.device_used_bytes for priced in ends]
        needs.append(min(used, default=None))
    least = min((need for need in needs if need is not None), default=None)
    for candidate, need in zip(group, needs, strict=True):
        if need is not None and need == least:
            yield from (candidate.timed(index) for index in range(len(candidate.micros)) if candidate.fits(index))


def _in_time(group: Iterable[Candidate], limit: float) -> Iterator[Timed]:
    """Of each candidate those that are fast enough: the one with least memory may need a large micro-batch."""
    for candidate in group:
        for index in range(len(candidate.micros)):
            if candidate.seconds(index) <= limit and candidate.fits(index):
                yield candidate.timed(index)
