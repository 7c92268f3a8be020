"""Candidate: a shape on a number of devices, with its micro-batches; works out only what it is asked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from planner.candidates import Shape, configuration_of, micro_batches
from planner.estimate import Priced, job_of, price, timed
from planner.plan import Configuration, StepTime
from planner.ranking import Timed
from planner.request import Request

TILES = 0.95
"""Matrix products of a size that is no divisor of another may fill the device's last wave of tiles better."""
CACHES = 0.8
"""A larger micro-batch may outgrow a CPU's caches."""


class Candidate:
    """A shape on a request's devices, with the micro-batches it may take, smallest first.

    What was worked out is kept: asking twice costs nothing.
    """

    def __init__(self, request: Request, shape: Shape) -> None:
        self.request, self.shape = request, shape
        self.micros = micro_batches(request, shape)
        self._priced: dict[int, Priced] = {}
        self._times: dict[int, StepTime] = {}

    def configuration(self, index: int) -> Configuration:
        """With one of the micro-batches."""
        return configuration_of(self.request, self.shape, self.micros[index])

    def priced(self, index: int) -> Priced:
        """Memory, and whether that fits."""
        if index not in self._priced:
            self._priced[index] = price(self.request, self.configuration(index))
        return self._priced[index]

    def timed(self, index: int) -> Timed:
        priced = self.priced(index)
        return Timed(priced=priced, time=timed(priced))

    def fits(self, index: int) -> bool:
        return self.priced(index).judgement.verdict != "does_not_fit"

    def is_known(self, index: int) -> bool:
        """Whether this machine has run it, so that what it takes is not what is predicted."""
        known = self.request.experience.known
        return bool(known) and self.configuration(index) in known

    def ends(self) -> tuple[int, ...]:
        """The smallest micro-batch and the largest, if there are any: what takes least memory is one of the two."""
        return tuple(dict.fromkeys((0, len(self.micros) - 1))) if self.micros else ()

    def fits_somehow(self) -> bool:
        return any(self.fits(index) for index in self.ends())

    def time(self, index: int) -> StepTime:
        """Of a step as it is expected, had it never run; whether it fits or not."""
        if index not in self._times:
            job = job_of(self.request, self.configuration(index))
            self._times[index] = self.request.experience.expected(job)
        return self._times[index]

    def seconds(self, index: int) -> float:
        return self.time(index).step_seconds

    def bound(self) -> float:
        """Seconds that a step takes at least: the work of the largest micro-batch and the bubble of the smallest."""
        largest = self.time(len(self.micros) - 1)
        bubble = self.time(0).bubble_seconds - largest.bubble_seconds if self.shape.pp > 1 else 0.0
        slack = 1.0 if self.shape.sync_each_micro_batch else TILES
        return (largest.step_seconds + bubble) * (CACHES if self.request.cluster.device.is_cpu else slack)

    def fastest_fitting(self, seconds: float) -> int | None:
        """The fastest micro-batch that fits and takes at most so many seconds a step, of those that were not run."""
        index = self._fastest(self._rivals(len(self.micros) - 1))
        if index is None or self.seconds(index) > seconds:
            return None
        if self.fits(index):  # as it often does
            return index
        smallest = next((one for one in range(index) if TILES * self.seconds(one) <= seconds), None)
        if smallest is None or not self.fits(smallest):
            return None
        largest = self._first_that_does_not_fit(smallest, below=index) - 1
        index = self._fastest(self._rivals(largest))
        return None if index is None or self.seconds(index) > seconds else index

    def seems_hopeless(self) -> bool:
        """Whether it is known that the smallest micro-batch does not fit."""
        return 0 in self._priced and not self.fits(0)

    def _fastest(self, indices: Iterable[int]) -> int | None:
        return min((index for index in indices if not self.is_known(index)), key=self.seconds, default=None)

    def _rivals(self, largest: int) -> list[int]:
        """The micro-batches up to one of which any may be the fastest. Its divisors are not: they fill tiles no better.
        In a pipeline larger ones are faster until the bubble costs more than they save: all of them up to where two in
        a row have been slower than the fastest."""
        every = range(largest + 1)
        if self.shape.pp == 1 and not self.request.cluster.device.is_cpu:
            return [index for index in every if index == largest or self.micros[largest] % self.micros[index]]
        if self.shape.pp == 1:
            return list(every)
        fastest = 0
        for index in every:
            if self.seconds(index) < self.seconds(fastest):
                fastest = index
            elif index > fastest + 1:
                return list(every[:index])
        return list(every)

    def _first_that_does_not_fit(self, fitting: int, below: int) -> int:
        """The first after one that fits, up to one that does not."""
        if self.fits(below - 1):  # as often as not it is the next
            return below
        return bisect_left(range(below - 1), True, lo=fitting + 1, key=lambda index: not self.fits(index))
