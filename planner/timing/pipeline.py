"""How long a pipeline takes: its schedule, run through."""

from __future__ import annotations

from collections.abc import Sequence

SETTLED, AT_LEAST = 3, 24
"""Micro-batches per stage, and of any pipeline, after which each further one takes as long as the last."""


def one_forward_one_backward(
    forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float = 0.0
) -> float:
    """Seconds from the first forward to the last backward under 1F1B (arXiv 2104.04473, section 2.2).

    Stage s of p starts with p - s forwards, then takes a backward and a forward in turn, and ends with the backwards
    that are left. A stage waits for its neighbour's result and `hop` seconds for its way. Once the schedule has
    settled the rest is the schedule's period times their number.
    """
    simulated = min(micro_batches, max(AT_LEAST, SETTLED * len(forwards)))
    seconds = _simulated(forwards, backwards, simulated, hop)
    if simulated < micro_batches:
        seconds += (micro_batches - simulated) * _period(forwards, backwards, hop)
    return seconds


def _simulated(forwards: Sequence[float], backwards: Sequence[float], micro_batches: int, hop: float) -> float:
    """Wave i holds forward i of every stage, and the backward that goes before it there.

    Backward i - (p - s) of stage s needs the next stage's, which the wave before held; so two rows of times do for the
    whole schedule.
    """
    stages = len(forwards)
    free = [0.0] * stages
    # Behind the last stage there is none, whose gradient is always there.
    arrived = [-hop] * (stages + 1)
    for wave in range(micro_batches + stages):
        # Stage s takes its backward number wave - stages + s, as far as there is one.
        for stage in range(max(0, stages - wave), min(stages, micro_batches + stages - wave)):
            ready, returned = free[stage], arrived[stage + 1] + hop
            free[stage] = arrived[stage] = (ready if ready > returned else returned) + backwards[stage]
        if wave < micro_batches:
            sent = 0.0
            for stage, forward in enumerate(forwards):
                ready = free[stage]
                free[stage] = done = (ready if ready > sent else sent) + forward
                sent = done + hop
    return max(free)


def _period(forwards: Sequence[float], backwards: Sequence[float], hop: float) -> float:
    """Seconds per micro-batch once the pipeline runs evenly: the slowest round trip over neighbouring stages.

    A trip over n stages and back holds n micro-batches at a time, and crosses 2 (n - 1) times to a neighbour.
    """
    both = [forward + backward for forward, backward in zip(forwards, backwards, strict=True)]
    slowest = max(both)
    if not hop:
        return slowest
    for first in range(len(both)):
        trip = 0.0
        for count, stage in enumerate(both[first:], start=1):
            trip += stage
            slowest = max(slowest, (trip + 2 * hop * (count - 1)) / count)
    return slowest
