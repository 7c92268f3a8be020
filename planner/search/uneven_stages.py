"""Blocks of a pipeline's stages by the rate and the memory of the nodes that each stage lies on.

The ranks of a stage are consecutive (`strategies.parallel.mesh`: pp is the outermost dimension), so that a stage lies
on the nodes of its place in the order. Each stage is timed as if all nodes were like its own, with the embedding and
the head where they are, and the step is that of a schedule of unlike stages; memory is checked of every stage on every
kind of node that it lies on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.cost.combinations import why_contradictory, why_refused
from planner.cost.split import blocks_per_piece
from planner.cost.timing import stage_times
from planner.cost.timing.flops import executed_layers
from planner.cost.timing.pipeline import one_forward_one_backward
from planner.cost.timing.step import stage_of
from planner.search.estimate import Priced, adapted_of, job_of, price
from planner.search.evaluate import Candidate, best, bound
from planner.search.request import Request
from planner.search.space import enumerate_candidates, micro_batches
from planner.search.uneven_parts import Kind, Part, Shared, has_room
from planner.types.job import Job
from planner.types.plan import Configuration
from planner.types.shares import write_sizes

LAYOUTS = 4
"""Degrees of each kind of node, the fastest if all nodes were like it, of which stages are cut by rate."""
MOVES = 16
"""Blocks that are moved between stages after each has the same work, where few micro-batches fill the pipeline."""


def fastest_stages(request: Request, kinds: Sequence[Kind]) -> Shared | None:
    """Return the pipeline of unlike stages with the shortest step; None where none fits or may be."""
    code = code_base(request.workload.code)
    if request.objective == "memory" or request.workload.generates or not (code.runs_here or code.names_layers):
        return None
    every = (_Pipeline(request, kinds, chosen).cut() for chosen in _configurations(request, kinds))
    return min((shared for shared in every if shared is not None), key=lambda shared: shared.step_seconds, default=None)


def _configurations(request: Request, kinds: Sequence[Kind]) -> tuple[Configuration, ...]:
    """Return pipelines whose stages lie on unlike nodes, the best of each degrees if all nodes were like one kind.

    Each is there with the micro-batch next smaller and next larger too: of a part of the blocks another one fits.
    """
    chosen: dict[Configuration, None] = {}
    for kind in kinds:
        groups: dict[Hashable, list[Candidate]] = {}
        for layout in enumerate_candidates(kind.request):
            if layout.pp > 1 and layout.virtual_stages == 1 and _lies_on_unlike(kinds, layout.pp):
                degrees = layout.strategy, layout.tp, layout.pp, layout.cp, layout.ep
                groups.setdefault(degrees, []).append(Candidate(kind.request, layout))
        for group in sorted(groups.values(), key=bound)[:LAYOUTS]:
            fastest = best(group, "throughput")
            if fastest is not None:
                chosen |= dict.fromkeys(_near(request, group, fastest.configuration))
    return tuple(chosen)


def _near(request: Request, group: Sequence[Candidate], fastest: Configuration) -> Iterator[Configuration]:
    """Yield a configuration with its micro-batch and those next to it, as far as they go together."""
    own = next(other.layout for other in group if fastest in map(other.configuration, range(len(other.micros))))
    sizes = micro_batches(request, own)
    index = sizes.index(fastest.micro_batch_size)
    for size in sizes[max(index - 1, 0) : index + 2]:
        steps = request.workload.global_batch_size // (own.data_parallel * size)
        chosen = replace(fastest, micro_batch_size=size, gradient_accumulation_steps=steps)
        here = code_base(request.workload.code).runs_here
        if not (why_refused(chosen, adapted_of(request.workload)) if here else why_contradictory(chosen)):
            yield chosen


def _stages_on(kinds: Sequence[Kind], pp: int) -> tuple[tuple[Kind, ...], ...]:
    """Return the kinds of nodes that each stage lies on, which is on more than one where groups end inside it."""
    each = sum(kind.group.gpus for kind in kinds) // pp
    on: list[tuple[Kind, ...]] = []
    for stage in range(pp):
        first, own = 0, []
        for kind in kinds:
            if first < (stage + 1) * each and first + kind.group.gpus > stage * each:
                own.append(kind)
            first += kind.group.gpus
        on.append(tuple(own))
    return tuple(on)


def _lies_on_unlike(kinds: Sequence[Kind], pp: int) -> bool:
    return len({tuple(map(id, own)) for own in _stages_on(kinds, pp)}) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """Seconds of a micro-batch on a stage: of each block, and of the head where the stage ends in it."""

    forward: float
    backward: float
    head_forward: float
    head_backward: float

    def passes(self, blocks: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward pass of so many blocks."""
        return self.head_forward + blocks * self.forward, self.head_backward + blocks * self.backward

    def seconds(self, blocks: int) -> float:
        """Return the seconds of both passes."""
        return sum(self.passes(blocks))


class _Pipeline:
    """A configuration with a pipeline over unlike nodes, whose blocks are shared out."""

    def __init__(self, request: Request, kinds: Sequence[Kind], configuration: Configuration) -> None:
        self._request, self._configuration, self._pp = request, configuration, configuration.pp
        self._on = _stages_on(kinds, configuration.pp)
        self._blocks = request.facts.total_layers
        self._prices: dict[tuple[int, int], tuple[Priced, ...]] = {}

    def cut(self) -> Shared | None:
        """Share the blocks out, so that the step is shortest of those that fit; None where none fits."""
        if self._blocks < self._pp or executed_layers(job_of(self._request, self._configuration)) != self._blocks:
            return None
        most = [self._blocks - self._pp + 1] * self._pp
        while (blocks := balance([work.seconds for work in self._work], self._blocks, most)) is not None:
            too_many = [stage for stage, count in enumerate(blocks) if not self._fits(stage, count)]
            if not too_many:
                return self._shared(self._improved(blocks))
            for stage in too_many:
                most[stage] = self._most(stage, blocks[stage])
        return None

    @cached_property
    def _work(self) -> tuple[_Work, ...]:
        """The work of each stage on the slowest of its nodes."""
        evenly = self._named(blocks_per_piece(self._blocks, self._pp))
        return tuple(_work_of(self._slowest_job(evenly, stage)) for stage in range(self._pp))

    def _slowest_job(self, chosen: Configuration, stage: int) -> Job:
        jobs = (replace(job_of(kind.request, chosen), stage=stage) for kind in self._on[stage])
        return max(jobs, key=lambda job: _work_of(job).seconds(1))

    def _named(self, blocks: Sequence[int]) -> Configuration:
        return replace(self._configuration, layers_per_stage=write_sizes((1, count) for count in blocks))

    def _priced(self, stage: int, count: int) -> tuple[Priced, ...]:
        """Return a stage of so many blocks on each kind of its nodes; what others have does not change its memory."""
        if (stage, count) not in self._prices:
            others = blocks_per_piece(self._blocks - count, self._pp - 1)
            chosen = self._named((*others[:stage], count, *others[stage:]))
            self._prices[stage, count] = tuple(price(kind.request, chosen, stage=stage) for kind in self._on[stage])
        return self._prices[stage, count]

    def _fits(self, stage: int, count: int) -> bool:
        return all(has_room(priced, self._request) for priced in self._priced(stage, count))

    def _most(self, stage: int, too_many: int) -> int:
        """Return the most blocks with which a stage fits, below a number with which it does not; 0 without any."""
        return bisect_left(range(1, too_many), True, key=lambda count: not self._fits(stage, count))

    def _improved(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Move single blocks as long as the schedule gets shorter: from the busiest stage, or to the idlest."""
        for _ in range(MOVES):
            busy = [work.seconds(count) for work, count in zip(self._work, blocks, strict=True)]
            *idle, busiest = sorted(range(self._pp), key=busy.__getitem__)
            moves = {*((busiest, stage) for stage in idle), *((stage, idle[0]) for stage in (*idle[1:], busiest))}
            options = [
                tuple(count - (stage == giver) + (stage == taker) for stage, count in enumerate(blocks))
                for giver, taker in sorted(moves)
                if blocks[giver] > 1
            ]
            best_first = sorted((self._seconds(option), option) for option in options)
            shorter = (option for seconds, option in best_first if seconds < self._seconds(blocks))
            better = next((option for option in shorter if all(map(self._fits, range(self._pp), option))), None)
            if better is None:
                break
            blocks = better
        return blocks

    def _seconds(self, blocks: Sequence[int]) -> float:
        """Return the seconds of the schedule, without messages."""
        passes = [work.passes(count) for work, count in zip(self._work, blocks, strict=True)]
        forwards, backwards = zip(*passes, strict=True)
        return one_forward_one_backward(forwards, backwards, self._configuration.gradient_accumulation_steps)

    def _shared(self, blocks: Sequence[int]) -> Shared:
        chosen, parts = self._named(blocks), list[Part]()
        jobs = [self._slowest_job(chosen, stage) for stage in range(self._pp)]
        for stage, (count, time) in enumerate(zip(blocks, stage_times(jobs), strict=True)):
            expected = self._request.experience.correction(jobs[stage]).of(time)
            for kind, priced in zip(self._on[stage], self._priced(stage, count), strict=True):
                here = replace(priced, job=replace(priced.job, configuration=chosen))
                samples = chosen.micro_batch_size
                stages = range(stage, stage + 1)
                parts.append(
                    Part(group=kind.group, samples=samples, priced=here, time=expected, stages=stages, layers=count)
                )
        return Shared(configuration=chosen, parts=tuple(_together(parts)))


def _work_of(job: Job) -> _Work:
    stage, inside = stage_of(job)
    return _Work(
        forward=stage.block.forward + inside.forward / stage.layers,
        backward=stage.block.backward + stage.block.recomputed + inside.backward / stage.layers,
        head_forward=stage.head.forward,
        head_backward=stage.head.backward,
    )


def _together(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield neighbouring stages of one group with as many blocks as one part, with the memory that is fullest."""
    for _, alike in groupby(parts, key=lambda part: (id(part.group), part.layers)):
        own = list(alike)
        fullest = max(own, key=lambda part: part.pressure)
        longest = max(own, key=lambda part: part.time.step_seconds)
        stages = range(own[0].stages.start, own[-1].stages.stop)
        yield replace(fullest, time=longest.time, stages=stages)


def balance(work: Sequence[Callable[[int], float]], blocks: int, most: Sequence[int]) -> tuple[int, ...] | None:
    """Return the blocks of each stage, so that the stage with the most work has the least; None where none may be.

    `work` are the seconds of each stage by the number of its blocks, which grow with it; `most` how many each may have.
    Every stage has one at least. Blocks are dealt one by one to the stage that has least work with it, which no other
    dealing improves.
    """
    if blocks < len(work) or sum(most) < blocks or min(most) < 1:
        return None
    counts = [1] * len(work)
    ready = [(seconds(2), stage) for stage, seconds in enumerate(work) if most[stage] > 1]
    heapq.heapify(ready)
    for _ in range(blocks - len(work)):
        _, stage = heapq.heappop(ready)
        counts[stage] += 1
        if counts[stage] < most[stage]:
            heapq.heappush(ready, (work[stage](counts[stage] + 1), stage))
    return tuple(counts)
