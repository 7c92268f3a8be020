"""The step on two streams: when the busiest rank computes and when it communicates.

It is the walk that `step_time` adds up, laid out one unit after the other; its end is `step_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import Literal

from hardware_db.records import dataclass
from planner.cost.timing.data_parallel import Unit, Walk, walk
from planner.cost.timing.layout import SERIAL_SLOWDOWN, SLOWDOWN, beside
from planner.cost.timing.step import Parts, parts_of
from planner.types.job import Job

Stream = Literal["compute", "communication", "transfer"]
MOST_MICRO_BATCHES = 4
"""Drawn one by one; of more, the first two and the last, and those between in one span."""
_MOST_UNITS = 200
"""Of one pass, drawn one by one; more are drawn as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stream's work for a while: `start` and `seconds` from the beginning of the step.

    `kind` is `forward`, `backward`, `copies`, `optimizer`, `bubble` (waiting for other stages), `offload`, or what is
    communicated (`all_gather`, `reduce_scatter`, `all_reduce`, ..., `inside` for tp, cp and ep, `wait` for the slowest
    GPU). Of communication
    `exposed` are the seconds in which nothing is computed beside it, the slowdown of compute beside it included.
    """

    stream: Stream
    kind: str
    name: str
    start: float
    seconds: float
    exposed: float = 0.0

    @property
    def end(self) -> float:
        """Seconds from the beginning of the step to its end."""
        return self.start + self.seconds


def step_timeline(job: Job) -> tuple[Span, ...]:
    """Return the spans of one optimizer step of the busiest rank, in the order in which they start.

    The last one ends at `step_time(job).step_seconds`, and `exposed` adds up to its
    `exposed_communication_seconds`. Seconds.
    """
    parts = parts_of(job)
    rounds = job.configuration.gradient_accumulation_steps
    units = walk(job, parts.where, parts.busiest, parts.rates)
    pen = _Pen(slowdown=SERIAL_SLOWDOWN if parts.rates.serial else SLOWDOWN)
    shown, middle = _shown(rounds)
    for number in range(rounds):
        if number in middle:
            if number == middle[0]:
                _together(pen, parts, units, rounds, middle)
            continue
        assert number in shown
        _micro_batch(pen, parts, units, rounds, number)
    pen.compute("bubble", "waiting for other stages", parts.time.bubble_seconds)
    pen.communication("wait", "waiting for the slowest GPU", parts.waiting)
    pen.units("end", "end of the step", units.end, 0.0)
    pen.compute("copies", "copies of parameters", parts.copies)
    pen.add("transfer", "offload", "host and disk", parts.time.offload_seconds)
    pen.compute("optimizer", "optimizer step", parts.time.optimizer_seconds)
    return tuple(sorted(pen.spans, key=lambda span: (span.start, span.stream)))


def _shown(rounds: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return which micro-batches are drawn by themselves, and which together."""
    if rounds <= MOST_MICRO_BATCHES:
        return range(rounds), range(0)
    return (0, 1, rounds - 1), range(2, rounds - 1)


def _micro_batch(pen: _Pen, parts: Parts, units: Walk, rounds: int, number: int) -> None:
    label = f"micro-batch {number + 1}" if rounds > 1 else ""
    forward = units.forward if number < units.gathers else ()
    pen.units("forward", label, forward, parts.busiest.forward, rest_first=False)
    pen.communication("inside", f"inside blocks {label}".strip(), parts.inside.forward)
    backward = units.reduced if number >= rounds - units.reductions else units.quiet
    pen.units("backward", label, backward, parts.busiest.backward, rest_first=True)
    pen.communication("inside", f"inside blocks {label}".strip(), parts.inside.backward)


def _together(pen: _Pen, parts: Parts, units: Walk, rounds: int, middle: Sequence[int]) -> None:
    """Several micro-batches in two spans."""
    aside = _Pen(slowdown=pen.slowdown)
    for number in middle:
        _micro_batch(aside, parts, units, rounds, number)
    label = f"micro-batches {middle[0] + 1} to {middle[-1] + 1}"
    exposed = sum(span.exposed for span in aside.spans)
    communicating = sum(span.seconds for span in aside.spans if span.stream == "communication")
    start, pen.now = pen.now, pen.now + aside.now
    pen.spans.append(Span(stream="compute", kind="middle", name=label, start=start, seconds=aside.now - exposed))
    if communicating:
        pen.spans.append(
            Span(stream="communication", kind="middle", name=label, start=start, seconds=aside.now, exposed=exposed)
        )


@dataclass(kw_only=True, slots=True)
class _Pen:
    """Draws span after span, from `now` on."""

    slowdown: float
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def add(self, stream: Stream, kind: str, name: str, seconds: float, exposed: float = 0.0) -> None:
        if seconds > 0:
            self.spans.append(
                Span(stream=stream, kind=kind, name=name, start=self.now, seconds=seconds, exposed=exposed)
            )
            self.now += seconds

    def compute(self, kind: str, name: str, seconds: float) -> None:
        self.add("compute", kind, name, seconds)

    def communication(self, kind: str, name: str, seconds: float) -> None:
        self.add("communication", kind, name, seconds, exposed=seconds)

    def units(self, kind: str, label: str, units: Iterable[Unit], compute: float, *, rest_first: bool = False) -> None:
        """One pass: its units, and the compute beside which nothing is communicated before or after them."""
        drawn = [unit for unit in units if unit[0] and (unit[1] or unit[2])]
        rest = max(0.0, compute - sum(count * seconds for count, seconds, _, _ in drawn))
        name = f"{kind} {label}".strip()
        if rest_first:
            self.compute(kind, name, rest)
        for count, seconds, communication, what in _one_by_one(drawn):
            self._unit(kind, name, what, count * seconds, count * communication)
        if not rest_first:
            self.compute(kind, name, rest)

    def _unit(self, kind: str, name: str, what: str, compute: float, communication: float) -> None:
        """Compute and communication that start together; each is slower while both run."""
        exposed = beside(compute, communication, slowdown=self.slowdown)
        both = self.slowdown * min(compute, communication)
        start, self.now = self.now, self.now + compute + exposed
        if compute:
            seconds = both + max(0.0, compute - communication)
            self.spans.append(Span(stream="compute", kind=kind, name=name, start=start, seconds=seconds))
        if communication:
            seconds = both + max(0.0, communication - compute)
            self.spans.append(
                Span(
                    stream="communication",
                    kind=what,
                    name=f"{what} {name}",
                    start=start,
                    seconds=seconds,
                    exposed=exposed,
                )
            )


def _one_by_one(units: Sequence[Unit]) -> Iterator[Unit]:
    for count, compute, communication, what in units:
        whole = int(count)
        if whole == count and 1 < whole <= _MOST_UNITS:
            yield from ((1, compute, communication, what),) * whole
        else:
            yield count, compute, communication, what
