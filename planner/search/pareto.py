"""The Pareto front: plans that no other beats in time, memory and number of devices at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.search.device_counts import on_fewer_devices
from planner.search.evaluate import Candidate
from planner.search.ranking import Timed, order, worth
from planner.search.request import Request
from planner.search.space import enumerate_candidates

ALIKE = 0.1
"""A plan that is better than another by less, in time and in memory, is no choice of its own."""


@dataclass(frozen=True, slots=True)
class _Point:
    """What is made small: GPU-seconds where cost counts, else seconds of a step; bytes; devices."""

    worth: float
    used: float
    gpus: int

    def no_worse_than(self, other: _Point, slack: float = 0.0) -> bool:
        return (
            self.gpus <= other.gpus
            and self.worth <= other.worth * (1 + slack)
            and self.used <= other.used * (1 + slack)
        )


def pareto_front(request: Request) -> tuple[Timed, ...]:
    """The Pareto front over step time (or cost, where that is the objective), memory of a device and devices, from all
    the devices down to one; on each number of them the best first. Plans that `dsplan run` cannot run are there only
    where the request allows them, and plans that end too late are not."""
    objective: words.Objective = "cost" if request.objective == "cost" else "throughput"
    found: list[tuple[_Point, Timed]] = []
    limit = request.budget.step_limit(request.workload)
    for candidate in _candidates(request):
        for item in _unbeaten(candidate, [point for point, _ in found], objective):
            point = _point(item, objective)
            if item.time.step_seconds > limit:
                continue
            if not any(other.no_worse_than(point) for other, _ in found):
                found = [(other, kept) for other, kept in found if not point.no_worse_than(other)] + [(point, item)]
    ranked = sorted(found, key=lambda pair: (-pair[0].gpus, order(pair[1], objective)))
    return tuple(_distinct(ranked))


def _candidates(request: Request) -> Iterator[Candidate]:
    for option in (request, *on_fewer_devices(request)):
        for layout in enumerate_candidates(option):
            candidate = Candidate(option, layout)
            if candidate.micros:
                yield candidate


def _unbeaten(candidate: Candidate, points: Sequence[_Point], objective: words.Objective) -> Iterator[Timed]:
    """A candidate's configurations that fit, unless the best that it could be is beaten already."""
    gpus = candidate.request.cluster.gpus
    least = [candidate.priced(index).memory.device_used_bytes for index in candidate.ends() if candidate.fits(index)]
    if not least:
        return
    could_be = _Point(candidate.bound() * (gpus if objective == "cost" else 1), min(least), gpus)
    if any(point.no_worse_than(could_be) for point in points):
        return
    for index in range(len(candidate.micros)):
        if candidate.fits(index):
            yield candidate.timed(index)


def _point(item: Timed, objective: words.Objective) -> _Point:
    return _Point(
        worth(item, objective),
        item.priced.memory.device_used_bytes,
        item.configuration.world_size,
    )


def _distinct(ranked: Sequence[tuple[_Point, Timed]]) -> Iterator[Timed]:
    kept: list[_Point] = []
    for point, item in ranked:
        if not any(other.no_worse_than(point, ALIKE) for other in kept):
            kept.append(point)
            yield item
