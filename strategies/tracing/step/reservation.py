"""Bytes that the caching allocator holds over the first steps of a job, which follow from one traced step.

A trace has the optimizer's states before its only step. A job makes them behind its first backward pass, in what
activations have left free, so that the recorded parts are run again in a job's order: the model is made and sharded,
then come three steps, of which the first makes the states and the last is measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.cost.memory.allocator import Event, Free, Mark, Peak, Replay, Request

STEPS = 3
"""From the third step on a job asks for the same again: DDP makes its buckets anew in the second."""


@dataclass(kw_only=True, slots=True)
class Recorded:
    """Requests and frees of the parts of a traced step.

    `makes` is up to where the model is ready, `states` the update that makes the optimizer's states, of gradients
    that are there for it alone (`stand_ins`), `passes` all micro-batches' forward and backward, `first` those of the
    first step where they differ, `sums` the names of gradients of `passes` with those of the same in `first`, `updates`
    the update in the steady state, `between` what comes behind the first step only.
    """

    makes: Sequence[Event] = ()
    states: Sequence[Event] = ()
    stand_ins: Sequence[Event] = ()
    passes: Sequence[Event] = ()
    first: Sequence[Event] = ()
    sums: Mapping[Hashable, Hashable] = field(default_factory=dict)
    updates: Sequence[Event] = ()
    between: Sequence[Event] = field(default_factory=tuple)

    def peaks(self, workspace: int = 0) -> Mapping[str, Peak]:
        """Return the peaks of the last step's phases, beside a library's workspace of so many bytes."""
        replay = Replay()
        alive = _Alive()
        replay.run(alive.consistent([*self.makes, Mark(clears=True)]))
        if workspace:
            replay.run([Request("workspace", workspace)])
        for number in range(STEPS):
            if number == STEPS - 1:
                replay.run([Mark()])
                replay.peaks.clear()
            if number == 0:
                replay.run(alive.consistent([*(self.first or self.passes), *self._first_update(), *self.between]))
            else:
                replay.run(alive.consistent([*self.passes, *self.updates]))
        return {name: peak for name, peak in replay.peaks.items() if name}

    def _first_update(self) -> Iterator[Event]:
        """Yield the update that makes the states; it frees the gradients of the passes before it, each in its turn."""
        foreign = {event.name for event in self.stand_ins if isinstance(event, Request)}
        gradients = self.sums if self.first else {name: name for name in _left_by(self.passes)}
        freed = [gradients[event.name] for event in self.updates if isinstance(event, Free) and event.name in gradients]
        stand_ins = sum(isinstance(event, Free) and event.name in foreign for event in self.states)
        in_turn, waiting = stand_ins == len(freed), iter(freed)
        for event in self.states:
            if isinstance(event, Mark) or event.name not in foreign:
                yield event
            elif isinstance(event, Free) and in_turn:
                yield Free(next(waiting))
        yield from map(Free, waiting)


def _left_by(events: Iterable[Event]) -> list[Hashable]:
    """Return the names of what was requested and not freed, in the order of the requests."""
    left: dict[Hashable, None] = {}
    for event in events:
        if isinstance(event, Request):
            left[event.name] = None
        elif isinstance(event, Free):
            left.pop(event.name, None)
    return list(left)


class _Alive:
    """Names that are in use: a part that is run again frees what its last run left, and nothing twice."""

    def __init__(self) -> None:
        self._names: set[Hashable] = set()

    def consistent(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events in which nothing is made that is there, or freed that is not."""
        for event in events:
            if isinstance(event, Request):
                if event.name in self._names:
                    yield Free(event.name)
                self._names.add(event.name)
            elif isinstance(event, Free):
                if event.name not in self._names:
                    continue
                self._names.remove(event.name)
            yield event
