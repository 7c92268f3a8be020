"""The Pareto front: plans that no other beats in time, memory and number of devices at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.search.device_counts import on_fewer_devices
from planner.search.evaluate import Candidate, Family, families_of
from planner.search.ranking import Timed, order, worth
from planner.search.request import Request
from planner.search.space import enumerate_candidates

ALIKE = 0.1
"""A plan that is better than another by less, in time and in memory, is no choice of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """Values to make small: GPU-seconds where cost counts, else seconds of a step; bytes; devices."""

    worth: float
    used: float
    gpus: int

    def no_worse_than(self, other: _Point, slack: float = 0.0) -> bool:
        return (
            self.gpus <= other.gpus
            and self.worth <= other.worth * (1 + slack)
            and self.used <= other.used * (1 + slack)
        )


def pareto_front(request: Request, priced_before: Iterable[Candidate] = ()) -> tuple[Timed, ...]:
    """Return the Pareto front over step time (or cost, where that is the objective), memory of a device and devices.

    It is of all the devices down to one, the best first on each number of them. Plans that `dsplan run` cannot run are
    there only where the request allows them, and plans that end too late are not. `worked_out` are all candidates of
    some numbers of devices, of which a search has worked out some already.

    Families are looked at in the order of the best time that each could take, so that most are beaten before their
    memory is worked out: exact as `planner.search.evaluate` is.
    """
    objective: words.Objective = "cost" if request.objective == "cost" else "throughput"
    unbeaten: list[tuple[_Point, Timed]] = []
    limit = request.budget.step_limit(request.workload)
    families = [family for family in families_of(_candidates(request, priced_before)) if not family.is_hopeless()]
    for family in sorted(families, key=lambda family: family.bound() * _weight(family.gpus, objective)):
        for item in _unbeaten(family, unbeaten, objective):
            point = _point(item, objective)
            if item.time.step_seconds <= limit and not any(_goes_before(other, (point, item)) for other in unbeaten):
                unbeaten = [other for other in unbeaten if not point.no_worse_than(other[0])] + [(point, item)]
    ranked = sorted(unbeaten, key=lambda pair: (-pair[0].gpus, order(pair[1], objective)))
    return tuple(_distinct(ranked))


def _goes_before(other: tuple[_Point, Timed], item: tuple[_Point, Timed]) -> bool:
    """Return whether a plan is as good; of two that are equally good the one that ranks first."""
    if other[0] == item[0]:
        return order(other[1], "throughput") <= order(item[1], "throughput")
    return other[0].no_worse_than(item[0])


def _candidates(request: Request, priced_before: Iterable[Candidate]) -> Iterator[Candidate]:
    counts = set()
    for candidate in priced_before:
        counts.add(candidate.request.cluster.gpus)
        yield candidate
    for option in (request, *on_fewer_devices(request)):
        if option.cluster.gpus not in counts:
            yield from (Candidate(option, layout) for layout in enumerate_candidates(option))


def _unbeaten(family: Family, unbeaten: list[tuple[_Point, Timed]], objective: words.Objective) -> Iterator[Timed]:
    """Yield a family's configurations that fit, but for those of which it is known before that they are beaten."""
    weight = _weight(family.gpus, objective)

    def beaten(seconds: float, used: float) -> bool:
        point = _Point(worth=seconds * weight, used=used, gpus=family.gpus)
        return any(other != point and other.no_worse_than(point) for other, _ in unbeaten)

    if beaten(family.bound(), family.resident_bytes()) or not family.fits_somehow():
        return
    # What is computed again takes no more memory, so that the last member says what all of them take at least.
    at_first, at_last = (family.members[-1].used_bytes(index) for index in (0, len(family.members[-1].micros) - 1))
    for member in family.members:
        if not member.may_fit() or beaten(member.bound(member.largest_possible()), min(at_first, at_last)):
            continue
        least, last = at_first, len(member.micros) - 1
        for index in range(last):
            if member.is_known(index) or not beaten(member.seconds(index), least):
                if not member.fits(index):
                    break
                least = member.used_bytes(index)
                yield member.timed(index)
        if (member.is_known(last) or not beaten(member.seconds(last), at_last)) and member.fits(last):
            yield member.timed(last)


def _weight(gpus: int, objective: words.Objective) -> int:
    return gpus if objective == "cost" else 1


def _point(item: Timed, objective: words.Objective) -> _Point:
    return _Point(
        worth=worth(item, objective),
        used=item.priced.memory.device_used_bytes,
        gpus=item.configuration.world_size,
    )


def _distinct(ranked: Sequence[tuple[_Point, Timed]]) -> Iterator[Timed]:
    kept: list[_Point] = []
    for point, item in ranked:
        if not any(other.no_worse_than(point, ALIKE) for other in kept):
            kept.append(point)
            yield item
