"""The best configuration of a group of layouts, with as few of them priced as that takes.

A step's time is cheap to work out and needs no memory; memory is not cheap. So the layouts of a group are looked at in
the order of the best that each could be, until none that is left can beat what was found. That is exact as long as

- memory grows with the micro-batch, but for the last of them, which needs no gradients to be kept from one to the next;
- no micro-batch takes less work than the largest where it divides it (else TILES of it at least, or CACHES on a CPU),
  and none has a shorter bubble than the smallest;
- computing activations again takes time and no more memory: selective checkpointing that does is dropped;
- the same layout over fewer devices takes no less memory of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace

from planner import vocabulary as words
from planner.cost.memory.activations.instants import selective_saves
from planner.cost.memory.host import host_load_bytes, offloaded_bytes
from planner.cost.precision import recipe_of
from planner.cost.verdict import device_limit, host_limit
from planner.search.estimate import Priced, job_of, least_bytes, price, resident_bytes, time_step
from planner.search.ranking import ONE_STRATEGY, Timed, clearly_worse, order, worth
from planner.search.request import Request
from planner.search.space import CandidateLayout, configuration_of, micro_batches
from planner.types.job import Job
from planner.types.plan import Configuration, StepTime

# A candidate is a layout on a number of devices with its micro-batches, evaluated lazily.


TILES = 0.95
"""Matrix products of a size that is no divisor of another may fill the device's last wave of tiles better."""
CACHES = 0.8
"""A larger micro-batch may outgrow a CPU's caches."""


class Candidate:
    """A layout on a request's devices, with the micro-batches it may take, smallest first.

    Results are cached: asking twice costs nothing.
    """

    def __init__(self, request: Request, layout: CandidateLayout) -> None:
        self.request, self.layout = request, layout
        self.micros = micro_batches(request, layout)
        self._configurations: dict[int, Configuration] = {}
        self._priced: dict[int, Priced] = {}
        self._times: dict[int, StepTime] = {}
        self._verdicts: tuple[words.Verdict, ...] = ("fits", "tight")
        self._possible: dict[int, bool] = {}
        self._largest: int | None = None

    def with_room(self) -> Candidate:
        """Return the same candidate, of which only what has room in memory fits; both share their results."""
        other = copy(self)
        other._verdicts = ("fits",)
        return other

    def configuration(self, index: int) -> Configuration:
        """Return the configuration with one of the micro-batches."""
        if index not in self._configurations:
            self._configurations[index] = configuration_of(self.request, self.layout, self.micros[index])
        return self._configurations[index]

    def priced(self, index: int) -> Priced:
        """Memory, and whether that fits."""
        if index not in self._priced:
            self._priced[index] = price(self.request, self.configuration(index))
        return self._priced[index]

    def timed(self, index: int) -> Timed:
        """Return one of the micro-batches with its step time."""
        priced = self.priced(index)
        return Timed(priced=priced, time=time_step(priced))

    def used_bytes(self, index: int) -> int:
        """Memory of a device."""
        return self.priced(index).memory.device_used_bytes

    def fits(self, index: int) -> bool:
        """Return whether one of the micro-batches fits, with room where that is asked for.

        It does so with every margin, unless the request goes to the limit.
        """
        judgement = self.priced(index).judgement
        return judgement.verdict in self._verdicts and (judgement.keeps_margins or self.request.to_the_limit)

    def has_run(self, index: int) -> bool:
        """Return whether this machine has run it and it still fits, with room or without, which the run has shown."""
        return self.is_known(index) and self.priced(index).judgement.verdict != "does_not_fit"

    def least_bytes(self, index: int) -> float:
        """Memory of a device that one of the micro-batches takes at least, for much less work than what it takes."""
        return least_bytes(job_of(self.request, self.configuration(index)))

    def is_known(self, index: int) -> bool:
        """Return whether this machine has run it, so that what it takes is not what is predicted."""
        known_runs = self.request.experience.known_runs
        return bool(known_runs) and self.configuration(index) in known_runs

    def ends(self) -> tuple[int, ...]:
        """Return the smallest micro-batch and the largest, if there are any: one of the two takes least memory."""
        return tuple(dict.fromkeys((0, len(self.micros) - 1))) if self.micros else ()

    def fits_somehow(self) -> bool:
        """Return whether any micro-batch fits."""
        return any(self.fits(index) for index in self.ends())

    def selective_saves(self) -> bool:
        """Return whether selective checkpointing keeps less than none, which no degree changes."""
        job = job_of(self.request, self.configuration(0))
        return selective_saves(job, recipe_of(job))

    def time(self, index: int) -> StepTime:
        """Return the time of a step as it is expected, had it never run; whether it fits or not."""
        if index not in self._times:
            job = job_of(self.request, self.configuration(index))
            self._times[index] = self.request.experience.expected(job)
        return self._times[index]

    def seconds(self, index: int) -> float:
        """Return the seconds of a step as they are expected."""
        return self.time(index).step_seconds

    def largest_possible(self) -> int:
        """Return the largest micro-batch that may fit by what it takes at least; the smallest if none may."""
        if self._largest is None:
            last = len(self.micros) - 1
            if self._may_fit(last):
                self._largest = last
            else:
                self._largest = max(bisect_left(range(last), True, key=lambda index: not self._may_fit(index)) - 1, 0)
        return self._largest

    def _may_fit(self, index: int) -> bool:
        if index not in self._possible:
            self._possible[index] = not _is_hopeless(job_of(self.request, self.configuration(index)))
        return self._possible[index]

    def may_fit(self) -> bool:
        """Return whether any micro-batch may fit by what it takes at least."""
        return any(self._may_fit(index) for index in self.ends())

    def bound(self, largest: int) -> float:
        """Seconds that a step takes at least up to a micro-batch: the work of that and the bubble of the smallest."""
        step = self.time(largest)
        bubble = self.time(0).bubble_seconds - step.bubble_seconds if self.layout.pp > 1 else 0.0
        slack = 1.0 if self.layout.sync_each_micro_batch else TILES
        return (step.step_seconds + bubble) * (CACHES if self.request.cluster.device.is_cpu else slack)

    def fastest_fitting(self, seconds: float) -> int | None:
        """Return the fastest micro-batch, of those not run, that fits and takes at most so many seconds a step."""
        index = self._fastest(self._rivals(self.largest_possible()))
        if index is None or self.seconds(index) > seconds:
            return None
        if self.fits(index):  # as it often does
            return index
        smallest = next((earlier for earlier in range(index) if TILES * self.seconds(earlier) <= seconds), None)
        if smallest is None or not self.fits(smallest):
            return None
        largest = self._first_that_does_not_fit(smallest, below=index) - 1
        index = self._fastest(self._rivals(largest))
        return None if index is None or self.seconds(index) > seconds else index

    def seems_hopeless(self) -> bool:
        """Return whether it is known that the smallest micro-batch does not fit."""
        return 0 in self._priced and not self.fits(0)

    def _fastest(self, indices: Iterable[int]) -> int | None:
        return min((index for index in indices if not self.is_known(index)), key=self.seconds, default=None)

    def _rivals(self, largest: int) -> list[int]:
        """Return the micro-batches up to one of which any may be the fastest.

        Its divisors are not: they fill tiles no better. In a pipeline larger ones are faster until the bubble costs
        more than they save: all of them up to where two in a row have been slower than the fastest.
        """
        every = range(largest + 1)
        if self.layout.pp == 1 and not self.request.cluster.device.is_cpu:
            return [index for index in every if index == largest or self.micros[largest] % self.micros[index]]
        if self.layout.pp == 1:
            return list(every)
        fastest = 0
        for index in every:
            if self.seconds(index) < self.seconds(fastest):
                fastest = index
            elif index > fastest + 1:
                return list(every[:index])
        return list(every)

    def _first_that_does_not_fit(self, fitting: int, below: int) -> int:
        """Return the first after one that fits, up to one that does not."""
        if self.fits(below - 1):  # as often as not it is the next
            return below
        return bisect_left(range(below - 1), True, lo=fitting + 1, key=lambda index: not self.fits(index))


class Family:
    """Candidates that differ only in the activations they compute again: none first, all last."""

    def __init__(self, members: Sequence[Candidate]) -> None:
        self.members = members
        self.gpus = members[0].request.cluster.gpus

    def bound(self) -> float:
        """Seconds that a step of any of them takes at least: without recomputation, of what may fit with it."""
        return self.members[0].bound(self.members[-1].largest_possible())

    def is_hopeless(self) -> bool:
        """Return whether what any of them takes at least does not fit, on the device or on the host."""
        return not self.members[-1].may_fit()

    def resident_bytes(self) -> float:
        """Device memory that any of them takes at least: what rests there when a backward pass ends."""
        first = self.members[0]
        return min(resident_bytes(job_of(first.request, first.configuration(index))) for index in first.ends())

    def first_that_fits(self) -> Priced | None:
        """Without recomputation if that fits, else with the least that makes it; None without one."""
        if self.is_hopeless() or not self.fits_somehow():
            return None
        return next(
            (member.priced(index) for member in self.members for index in member.ends() if member.fits(index)), None
        )

    def fits_somehow(self) -> bool:
        """Return whether the member that takes least memory fits."""
        return self.members[-1].fits_somehow()

    def misses(self) -> Iterator[Priced]:
        """Return what takes least memory, where nothing fits."""
        last = self.members[-1]
        return (last.priced(index) for index in last.ends())

    @property
    def split(self) -> tuple[object, ...]:
        """Traits in common with the same family over fewer devices."""
        layout = self.members[0].layout
        degrees = layout.tp, layout.pp, layout.cp, layout.ep, layout.virtual_stages, layout.pp_schedule
        shards = layout.dp_shard if layout.dp_replicate > 1 else 0
        return layout.strategy, shards, *degrees, layout.offload, layout.offload_ratio, layout.sync_each_micro_batch

    def within(self, seconds: float) -> Iterator[Timed]:
        """Ever faster configurations that fit and take at most so many seconds a step."""
        for member in self.members:
            if member.may_fit() and member.bound(member.largest_possible()) <= seconds:
                index = member.fastest_fitting(seconds)
                if index is not None:
                    seconds = member.seconds(index)
                    yield member.timed(index)
                elif member.seems_hopeless() and not self.fits_somehow():
                    return


def _is_hopeless(job: Job) -> bool:
    """Return whether what a job takes at least does not fit, nor what it loads or offloads on the host."""
    on_host = host_limit(job.workload, job.cluster)
    if on_host and not job.cluster.device.is_cpu:
        offloaded = job.cluster.gpus_per_node * offloaded_bytes(job, recipe_of(job))
        if max(host_load_bytes(job), offloaded) > on_host:
            return True
    return least_bytes(job) > device_limit(job.workload, job.cluster)


def best(group: Sequence[Candidate], objective: words.Objective, limit: float = math.inf) -> Timed | None:
    """Return the best configuration of a group that fits and takes at most `limit` seconds a step; None without one."""
    fastest: Timed | None = None
    for timed_ in _smallest(group, limit) if objective == "memory" else _fast(group, objective, limit):
        if fastest is None or order(timed_, objective) < order(fastest, objective):
            fastest = timed_
    return fastest


def preferred(group: Sequence[Candidate], objective: words.Objective, limit: float = math.inf) -> Timed | None:
    """Return the best configuration of a group, or the best with room in memory if the two cannot be told apart."""
    first = best(group, objective, limit)
    if first is None or first.has_room or objective == "memory":
        return first
    near = first.time.step_seconds * (1 + ONE_STRATEGY) if objective == "throughput" else math.inf
    roomy = best([candidate.with_room() for candidate in group], objective, min(limit, near))
    if roomy is None or clearly_worse(roomy, first, objective):
        return first
    return replace(roomy, passed_over=first)


def bound(group: Sequence[Candidate]) -> float:
    """Seconds that a step of any of a group takes at least, had it never run; infinite where none can fit."""
    families = (family for family in families_of(group) if not family.is_hopeless())
    least = min((family.bound() for family in families), default=math.inf)
    return min([least, *(run.time.step_seconds for run in _already_run(group))])


def any_that_fits(group: Iterable[Candidate]) -> Priced | None:
    """Return the first configuration that fits, or None without one."""
    return next((fitting for family in families_of(group) if (fitting := family.first_that_fits()) is not None), None)


def closest(group: Sequence[Candidate]) -> Priced | None:
    """Return the configuration that misses by least, of a group in which nothing fits."""
    misses = (priced for family in families_of(group) for priced in family.misses())
    return min(misses, key=lambda priced: priced.judgement.pressure, default=None)


def _fast(group: Sequence[Candidate], objective: words.Objective, limit: float) -> Iterator[Timed]:
    """Yield what was measured before, then ever better configurations by time or cost."""
    least_worth = math.inf
    for run in _already_run(group):
        if run.time.step_seconds <= limit:
            least_worth = min(least_worth, worth(run, objective))
            yield run
    families = [family for family in families_of(group) if not family.is_hopeless()]
    has_devices_enough = _devices_enough(families)
    weights = [family.gpus if objective == "cost" else 1 for family in families]
    bounds = [family.bound() * weight for family, weight in zip(families, weights, strict=True)]
    for index in sorted(range(len(families)), key=bounds.__getitem__):
        if bounds[index] > least_worth:
            return
        if not has_devices_enough(families[index]):
            continue
        for member in families[index].within(min(least_worth / weights[index], limit)):
            least_worth = min(least_worth, worth(member, objective))
            yield member


def _already_run(group: Iterable[Candidate]) -> Iterator[Timed]:
    """Yield what this machine has run, with the times that it took."""
    for candidate in group:
        for index in range(len(candidate.micros)):
            if candidate.has_run(index):
                yield candidate.timed(index)


def families_of(group: Iterable[Candidate]) -> list[Family]:
    """Candidates that differ only in what they compute again, together, in the order of the first of each."""
    alike: dict[tuple[int, CandidateLayout], list[Candidate]] = {}
    saves: dict[tuple[int, str], bool] = {}
    for candidate in group:
        if candidate.layout.checkpointing == "selective" and candidate.micros:
            key_of_saving = id(candidate.request), candidate.layout.strategy
            if key_of_saving not in saves:
                saves[key_of_saving] = candidate.selective_saves()
            if not saves[key_of_saving]:
                continue
        if candidate.micros:
            key = id(candidate.request), replace(candidate.layout, checkpointing="none")
            alike.setdefault(key, []).append(candidate)
    members = (
        sorted(family, key=lambda candidate: _RECOMPUTED[candidate.layout.checkpointing]) for family in alike.values()
    )
    return [Family(family) for family in members]


_RECOMPUTED: dict[words.Checkpointing, int] = {"none": 0, "selective": 1, "full": 2}


def _devices_enough(families: Sequence[Family]) -> Callable[[Family], bool]:
    """Return a check whether a family fits where the same is there over several numbers of devices, the largest first.

    How many are enough is looked for at the first of them that is asked about.
    """
    alike: dict[tuple[object, ...], list[Family]] = {}
    for family in families:
        alike.setdefault(family.split, []).append(family)
    fewest: dict[tuple[object, ...], float] = {}

    def has_enough(family: Family) -> bool:
        split = family.split
        descending = alike[split]
        if len(descending) == 1:
            return True
        if split not in fewest:
            count = bisect_left(descending, True, key=lambda smaller: not smaller.fits_somehow())
            fewest[split] = descending[count - 1].gpus if count else math.inf
        return family.gpus >= fewest[split]

    return has_enough


def _smallest(group: Sequence[Candidate], limit: float) -> Iterator[Timed]:
    """Every configuration of the candidates that can do with least memory."""
    if limit < math.inf:
        yield from _in_time(group, limit)
        return
    bounds = [
        (candidate.least_bytes(index), number, index)
        for number, candidate in enumerate(group)
        for index in candidate.ends()
    ]
    least: float = math.inf
    smallest: set[int] = set()
    for bound_bytes, number, index in sorted(bounds):
        if bound_bytes > least:
            break
        if not group[number].fits(index):
            continue
        used = group[number].used_bytes(index)
        if used < least:
            least, smallest = used, set()
        if used == least:
            smallest.add(number)
    for number in sorted(smallest):
        candidate = group[number]
        yield from (candidate.timed(index) for index in range(len(candidate.micros)) if candidate.fits(index))


def _in_time(group: Iterable[Candidate], limit: float) -> Iterator[Timed]:
    """Yield of each candidate those that are fast enough: the one with least memory may need a large micro-batch."""
    for candidate in group:
        for index in range(len(candidate.micros)):
            if candidate.seconds(index) <= limit and candidate.fits(index):
                yield candidate.timed(index)
