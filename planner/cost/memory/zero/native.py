"""Our own ZeRO besides weights, optimizer states and activations, moment by moment.

Source: `strategies/backends/zero/gradient_reducer.py`, `units.py` and `collectives.py`; bucket sizes come from
`planner.cost.zero_bucket_sizes`.

* A gradient is copied into its bucket, which is made whole for its first one and sent when the last one is there; a
  tensor that has a bucket to itself travels as it is. Two buckets are on the way while a third fills, and what a rank
  keeps of them is there when they are received. Between ranks on CPUs every owner receives the others' runs of what is
  on the way; NCCL makes the sum alone.
* In a model without blocks, whose backward is one moment of the forms, every gradient's copying is looked at.
* Stage 1 keeps whole gradients from the first micro-batch to the last, stages 2 and 3 this rank's part. In the last
  they go as they are reduced; in one between the first and the last all of them are there to the end.
* Stage 3 has the root's weights whole from the start of forward to the end of backward, and those of the block at work
  and of the next, where there is one: none while the head is at work. Its buckets are each of one unit, or of the small
  tensors that are never sharded.
* The step turns gradients into the masters' dtype a sixteenth at a time and applies them tensor by tensor.
* In 8 bits the buckets on the way are this rank's run in fp32 and what goes to and comes from the others; every rank
  remembers the rounding of what it sent.
* Where states are offloaded, a gradient has left a GPU soon after it was summed, and the step runs on the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from hardware_db.records import dataclass
from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.states import tensor_step_temporaries
from planner.cost.memory.units import Units, trained_shards_of, trained_units_of, units_of
from planner.cost.memory.zero.offload import offload_split, weights_are_whole, window_bytes
from planner.cost.memory.zero.partition import steps_whole_tensors
from planner.cost.precision import ERROR_BYTES, INT8_BYTES, Recipe
from planner.cost.zero_bucket_sizes import NATIVE_STEP_RUNS, bucket_members, native_buckets
from planner.types.job import Job

_ON_THE_WAY = 2
_GOING_DOWN = 4
"""Buckets whose sums may be on their way to the host at once (`strategies/backends/zero/offload.py`)."""
_WIDE = 4
"""Bytes of a gradient while it is made into 8 bits and added up."""
_FUSED_ON_HOST = ("adamw", "adamw-fused")
"""Optimizers that torch's fused kernels step on the host, in place."""


class NativeZeroBuffers:
    """Stages 1 to 3 of backend `native`.

    With `keeps_whole`, whole gradients wait for the last micro-batch, in which alone buckets fill.
    """

    def __init__(self, job: Job, recipe: Recipe) -> None:
        configuration, units, trained = job.configuration, units_of(job), trained_units_of(job)
        on_cpu = job.cluster.device.is_cpu
        buckets = native_buckets(configuration.zero_stage, hidden_size=job.facts.hidden_size, on_cpu=on_cpu)
        self._job, self._recipe = job, recipe
        self._split = split = offload_split(job)
        self._ranks, self._whole = configuration.state_shards, trained.elements
        self._bucket = max(buckets.reduce, trained.largest)
        self._received = 1 / self._ranks if not on_cpu else 1 - 1 / self._ranks
        self._in_8_bits = configuration.gradient_compression == "int8" and self._ranks > 1
        others = 1 - 1 / self._ranks
        self._errors = ERROR_BYTES * others * self._whole if self._in_8_bits else 0.0
        self._exchanged = 2 * INT8_BYTES * others
        self._micro_batches, self._largest = configuration.gradient_accumulation_steps, trained.largest
        self._several = self._micro_batches > 1
        once = configuration.zero_stage == 1 or not configuration.sync_each_micro_batch
        self.keeps_whole = self._several and once
        # On a CPU the gradients of states that are on disk stay in memory, which is where they go from a GPU.
        # A stage of a pipeline may train nothing.
        self._staying = 1.0 if on_cpu or not split.local else split.on_device / split.local
        self._going = 0.0 if on_cpu else recipe.gather * min(sum(split.on_host), _GOING_DOWN * split.largest)
        self._is_one_unit = not units.blocks
        blocks = max((unit.elements for unit in units.blocks), default=0.0)
        is_sharded = not weights_are_whole(job)
        by_unit = configuration.zero_stage == 3 and is_sharded
        threshold = buckets.persistence_threshold if by_unit else None
        self._fills = _fills(trained, buckets.reduce, threshold)
        self._block = recipe.gather * blocks if is_sharded else 0.0
        self._unsharded = recipe.gather * units.root.elements if is_sharded else 0.0
        shared, root = min(float(buckets.reduce), blocks), min(float(buckets.reduce), units.root.elements)
        self._largest_bucket = max(shared, root, trained.largest) if by_unit else self._bucket
        self._steps_together = configuration.optimizer == "adamw" and not on_cpu

    def at(self, instant: Instant) -> Ledger:
        """Gradients on their way and summed ones, and unsharded weights, at an instant."""
        last = self.in_last(instant)
        return max(last, self.before_last(instant), key=lambda ledger: ledger.total) if self.keeps_whole else last

    def in_last(self, instant: Instant) -> Ledger:
        """Return the ledger of a micro-batch whose gradients are reduced, beside those that wait."""
        with_gradients = instant.done_gradients + instant.unit_gradients
        ended = self._reducing(instant, with_gradients, *self._fills.state(instant, with_gradients))
        if not (self._is_one_unit and instant.unit_gradients and instant.unit == "table"):
            return ended
        passed = self._fills.passed(instant.done_gradients, with_gradients)
        return max((ended, *(self._reducing(instant, *moment) for moment in passed)), key=lambda ledger: ledger.total)

    def _reducing(self, instant: Instant, with_gradients: float, state: _State, newest: float) -> Ledger:
        """Return the ledger of an instant of such a micro-batch when so many elements of gradients have been made."""
        going = min(self._going, self._recipe.gather * with_gradients / self._ranks)
        gradients = going + self._waiting(with_gradients, state)
        return self._always(instant) + Ledger(gradients=gradients) + self._moving(newest, state)

    def before_last(self, instant: Instant) -> Ledger:
        """Return the ledger of a micro-batch whose gradients wait."""
        with_gradients = instant.done_gradients + instant.unit_gradients
        return self._always(instant) + self._unreduced(with_gradients, instant.unit_gradients)

    def _always(self, instant: Instant) -> Ledger:
        """Return unsharded weights, and what compression leaves out."""
        casts = instant.cast if instant.unit == "reference" else 0.0
        unsharded = self._unsharded + self._blocks_at(instant) * self._block
        return Ledger(buffers=unsharded + self._errors, temporaries=casts)

    def _blocks_at(self, instant: Instant) -> int:
        """Return how many blocks' weights are whole: the one at work, and the next one of the pass ahead of it."""
        if instant.unit != "block":
            return 0
        return min(instant.blocks - instant.blocks_done, 2) - instant.leaves

    def _unreduced(self, with_gradients: float, newest: float) -> Ledger:
        """Return the ledger of a micro-batch whose gradients wait.

        The ones before left theirs, all of it from the second micro-batch on, and there is the gradient that is about
        to be added to it.
        """
        before = self._whole if self._micro_batches > 2 else min(with_gradients, self._whole)
        added = self._micro_batches > 2 or self._recipe.gather != self._recipe.gradient
        transient = self._recipe.gather * min(newest, self._largest) if added else 0.0
        return Ledger(gradients=self._recipe.gradient * before + transient)

    def _moving(self, newest: float, state: _State) -> Ledger:
        """Return the buckets that fill and those on their way, beside the newest gradient."""
        width = self._recipe.gather
        if self._in_8_bits:
            own = _WIDE / self._ranks
            return Ledger(
                gradients=width * (state.filling + newest) + own * state.on_the_way,
                buffers=self._exchanged * state.on_the_way,
                temporaries=2 * own * min(state.filling + state.on_the_way, self._bucket),
            )
        received = self._received * state.on_the_way if self._ranks > 1 else 0.0
        return Ledger(gradients=width * (state.filling + state.on_the_way + newest), buffers=width * received)

    def own_moments(self) -> Sequence[tuple[str, Ledger]]:
        """Return the step, with gradients in the masters' dtype; the host's is the device's where that is a CPU."""
        split, width = self._split, self._recipe.master or self._recipe.weight
        is_whole = steps_whole_tensors(self._job.configuration)
        stepped = trained_units_of(self._job) if is_whole else trained_shards_of(self._job)
        temporaries = tensor_step_temporaries(self._job, stepped, width)
        moments = [Ledger()]
        if split.on_device > 0:
            share = split.on_device / split.local
            widens = width != self._recipe.gradient
            run = max(split.on_device / NATIVE_STEP_RUNS, min(self._largest_bucket / self._ranks, split.on_device))
            # Whole tensors are stepped at once, when each has freed its narrow gradient.
            widened = (width - self._recipe.gradient) * split.on_device if is_whole else width * run
            gradients = self._recipe.gradient * split.on_device + (widened if widens else 0.0)
            if widens and not is_whole:
                # A run is stepped by itself, when its narrow gradients are gone: what is made of all tensors at once is
                # made of the run's.
                moments.append(Ledger(gradients=gradients))
                gradients -= self._recipe.gradient * run
                share *= run / split.on_device if self._steps_together else 1.0
            moments.append(Ledger(gradients=gradients, temporaries=temporaries * share))
        if split.on_host and self._staying == 1.0:
            fused = self._job.configuration.optimizer in _FUSED_ON_HOST
            gradients = self._recipe.gradient * sum(split.on_host)
            widened = width * split.largest if width != self._recipe.gradient else 0.0
            states = window_bytes(self._job, self._recipe)
            working = widened + (0.0 if fused else temporaries)
            moments.append(Ledger(gradients=gradients, buffers=states, temporaries=working))
        return [("step", ledger + Ledger(buffers=self._errors)) for ledger in moments]

    def _waiting(self, with_gradients: float, state: _State) -> float:
        """Bytes of gradients that wait for the step."""
        width = self._recipe.gradient
        received = self._staying * state.received / self._ranks
        if self.keeps_whole:
            return width * (max(self._whole - with_gradients, 0.0) + received)
        return width * (self._staying * self._whole / self._ranks if self._several else received)


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Elements of gradients whose bucket fills, is on its way, and has been received."""

    filling: float
    on_the_way: float
    received: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fill:
    """A bucket of `elements`, begun and complete when so many elements of gradients have been made in a pass."""

    begins: float
    completes: float
    elements: int


class _Fills:
    """The buckets of a rank in the order in which backward completes them.

    `largest` is, by the unit at work, its largest tensor, and the largest of those that are copied into a bucket which
    they share.
    """

    def __init__(
        self, buckets: Sequence[_Fill], largest: Mapping[str, tuple[float, float]], tensors: Sequence[_Fill]
    ) -> None:
        self._buckets = sorted(buckets, key=lambda bucket: bucket.completes)
        self._completes = [bucket.completes for bucket in self._buckets]
        self._elements = list(accumulate((bucket.elements for bucket in self._buckets), initial=0))
        # Of the others the next one alone can have begun.
        before = [0.0, *self._completes]
        self._long = [bucket for bucket, end in zip(self._buckets, before, strict=False) if bucket.begins < end - _NEAR]
        self._largest = largest
        self._tensors = tensors

    def passed(self, first: float, last: float) -> Iterator[tuple[float, _State, float]]:
        """Yield how far backward is when a bucket takes each of the gradients from `first` to `last`, elements both.

        That is the elements made by then, where the buckets are, and the elements of the gradient itself, which
        autograd holds until the bucket that it completes is on its way. A bucket is there whole as soon as it takes
        one; what fills a bucket by itself is that bucket.
        """
        begins_of = {bucket.completes: bucket.begins for bucket in self._buckets}
        for tensor in self._tensors:
            if tensor.begins < first - _NEAR or tensor.completes > last + _NEAR:
                continue
            if begins_of.get(tensor.completes) == tensor.begins:
                yield tensor.completes, self.at(tensor.begins), float(tensor.elements)
                continue
            yield tensor.completes, self.at(tensor.begins + 2 * _NEAR), float(tensor.elements)
            if tensor.completes in begins_of:
                yield tensor.completes, self.at(tensor.completes), float(tensor.elements)

    def state(self, instant: Instant, taken: float) -> tuple[_State, float]:
        """Return where the buckets are, and the elements of the gradient that is beside them.

        A unit's first gradient begins its bucket when it is taken, and what it was made from is gone by then.
        """
        is_at_head = instant.unit == "reference" or (instant.enters and not instant.blocks_done)
        largest, copied = self._largest["head" if is_at_head else instant.unit]
        if instant.leaves or (instant.enters and (instant.phase != "backward" or instant.blocks_done)):
            return self.at(taken), 0.0
        if instant.enters:
            return self.at(taken), copied
        if instant.unit_gradients <= _WITH_BIAS * largest and not instant.takes:
            return self.at(taken - instant.unit_gradients), instant.unit_gradients
        return self.at(taken), min(instant.unit_gradients, copied)

    def at(self, taken: float) -> _State:
        """Return where the buckets are when so many elements of gradients have been made."""
        complete = bisect_right(self._completes, taken + _NEAR)
        begun = {id(bucket): bucket for bucket in (*self._buckets[complete : complete + 1], *self._long)}
        filling = sum(
            bucket.elements
            for bucket in begun.values()
            if bucket.begins < taken - _NEAR and bucket.completes > taken + _NEAR
        )
        received = self._elements[max(complete - _ON_THE_WAY, 0)]
        return _State(filling=filling, on_the_way=self._elements[complete] - received, received=received)


_WITH_BIAS = 1.02
"""A product's gradient and its bias's over the former, at most: a bias is one of some hundred rows."""
_NEAR = 0.5
"""Elements within which two sums of them are one: blocks of an instant are counted by their mean."""


@lru_cache(maxsize=64)
def _fills(units: Units, limit: int, threshold: int | None) -> _Fills:
    """Return the buckets of at most `limit` elements, as `strategies/backends/zero/sharded_model.py` deals them out.

    With a `threshold` each unit has buckets of its own, and tensors of up to so many elements have some together.
    """
    blocks = [block.sizes for block in units.blocks for _ in range(round(block.repeats))]
    members = [("root", size) for size in units.embedding]
    members += [(str(number), size) for number, sizes in enumerate(blocks) for size in sizes]
    members += [("root", size) for size in units.ending]
    # Backward makes the gradients from the last tensor to the first.
    completed = sum(size for _, size in members)
    groups: dict[str, list[_Fill]] = {}
    for owner, size in members:
        group = owner if threshold is not None and size > threshold else "together"
        groups.setdefault(group, []).append(_Fill(begins=completed - size, completes=completed, elements=size))
        completed -= size
    buckets = []
    for tensors in groups.values():
        for indices in bucket_members([tensor.elements for tensor in tensors], limit):
            of = [tensors[index] for index in indices]
            whole = sum(tensor.elements for tensor in of)
            buckets.append(_Fill(begins=of[-1].begins, completes=of[0].completes, elements=whole))
    sizes = {"head": units.ending, "table": units.embedding, "block": tuple(size for block in blocks for size in block)}
    shared = {unit: [size for size in of if 2 * size < limit] for unit, of in sizes.items()}
    largest = {unit: (float(max(of, default=0)), float(max(shared[unit], default=0))) for unit, of in sizes.items()}
    return _Fills(buckets, largest, [tensor for tensors in groups.values() for tensor in tensors])
