"""The memory of FSDP2 besides states and activations, moment by moment: unsharded units and reduction buffers.

Source: torch 2.13's `distributed/fsdp/_fully_shard` (`_fsdp_param_group.py`, `_fsdp_collectives.py`, `_fsdp_state.py`).
The blocks are units of their own; everything outside them is the root unit, which stays unsharded from the start of
forward to the end of backward. Buffers live as long as Python refers to them, on a CPU as on a GPU:

* An all-gather makes one buffer (`all_gather_output`) from a 16-bit copy of the shards (`all_gather_input`) and copies
  it out to one storage per parameter (`unsharded`). In forward the buffer stays until the next unit's is copied out; in
  backward it is freed at once, but the next unit has been all-gathered while this one works.
* A reduce-scatter copies the unit's gradients into one buffer (`reduce_scatter_input`), which stays until the next unit
  reduces; what comes out are the `sharded_gradients`. Parameters are freed before it, gradients after it. Gloo, which
  all-reduces, does so in a copy of that buffer (`ProcessGroupGloo::reduce_scatter_tensor_coalesced`).
* Between replicas a unit's sharded gradients are all-reduced in place, and the unit refers to what was all-reduced
  until backward ends (`AllReduceState`): beside the gradients that it was added to, where there were any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial

from hardware_db.records import dataclass
from planner.cost.memory.activations.instants import Instant
from planner.cost.memory.ledger import Ledger
from planner.cost.memory.reference import is_one_unit, unsharded_reference
from planner.cost.memory.units import Part, Shards, Unit, Units, part_of, rank_units, round_up, shards_over
from planner.cost.precision import Recipe
from planner.cost.split import reduces_each_micro_batch, reshards_weights
from planner.models.facts import ParameterCounts
from planner.types.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """One unit on one rank, in bytes, by the names of the module's docstring.

    `gradients` are the whole ones, in the dtype of compute, `newest` the largest of them; `last_gradient`, that of the
    last parameter, outlives the others, for `foreach_reduce` keeps it in a loop's variable. `accumulated` are the whole
    ones that earlier micro-batches left.
    """

    unsharded: float
    all_gather_output: float
    all_gather_input: float
    gradients: float
    newest: float
    last_gradient: float
    accumulated: float
    reduce_scatter_input: float
    gloo_copy: float
    sharded_gradients: float

    @property
    def all_gather_peak(self) -> float:
        """The most during its all-gather: the input beside the buffer, then the buffer beside the copies."""
        if not self.all_gather_output:
            return self.unsharded + self.all_gather_input
        return self.all_gather_output + max(self.all_gather_input, self.unsharded)


def frozen_unit_bytes(
    trained: Unit, held: Unit, recipe: Recipe, shards: Shards, *, offloads: bool, is_block: bool
) -> UnitBytes:
    """Return a unit's bytes where its frozen weights have a dtype of their own, in which they are all-gathered.

    FSDP2's mixed precision casts what is wider than compute, and a quantised model travels as it is stored.
    """
    own = unit_bytes(trained, trained, recipe, shards, offloads=offloads)
    local, width = held.shard(shards), recipe.frozen_gather
    narrow = width if recipe.quantised is None or not is_block else recipe.quantised
    widths = [narrow if len(shape) == 2 else width for shape in local.shapes]
    sizes = [size * each for size, each in zip(local.sizes, widths, strict=True)]
    whole = [size * each for size, each in zip(local.whole(shards), widths, strict=True)]
    alone, casts = shards.dense == shards.experts == 1, recipe.frozen_width > width
    return replace(
        own,
        unsharded=own.unsharded + sum(map(round_up, whole)),
        all_gather_output=own.all_gather_output + (0 if alone else round_up(sum(whole))),
        all_gather_input=own.all_gather_input + (sum(map(round_up, sizes)) if offloads or casts else 0),
    )


def unit_bytes(
    unit: Unit, trained: Unit, recipe: Recipe, shards: Shards, *, offloads: bool, width: float | None = None
) -> UnitBytes:
    """Return a unit's bytes over its ranks, `trained` being it without frozen weights.

    One rank alone unshards and reduces by copies, tensor by tensor. `width` are bytes of an unsharded parameter where
    they are not the recipe's.
    """
    gather = recipe.gather if width is None else width
    local, reduced = unit.shard(shards), trained.shard(shards)
    whole = local.whole(shards)
    alone, casts = shards.dense == shards.experts == 1, gather != recipe.weight
    if offloads:
        all_gather_input = local.bytes(gather) + (round_up(max(local.sizes, default=0) * recipe.weight) if casts else 0)
    elif casts:
        all_gather_input = round_up((max(local.sizes, default=0) if alone else local.elements) * gather)
    else:
        all_gather_input = 0
    return UnitBytes(
        unsharded=sum(round_up(size * gather) for size in whole),
        all_gather_output=0 if alone else round_up(sum(whole) * gather),
        all_gather_input=all_gather_input,
        gradients=trained.bytes(recipe.gather),
        newest=round_up(max(trained.sizes, default=0) * recipe.gather),
        last_gradient=0 if alone else round_up(sum(trained.sizes[-1:]) * recipe.gather),
        accumulated=trained.bytes(recipe.reduce),
        reduce_scatter_input=round_up(sum(reduced.whole(shards)) * recipe.reduce),
        gloo_copy=round_up(_reduced_at_once(reduced, shards) * recipe.reduce),
        sharded_gradients=round_up(reduced.elements * recipe.reduce),
    )


def _reduced_at_once(unit: Unit, shards: Shards) -> int:
    """Elements of the larger reduce-scatter of a unit: experts that fewer ranks share have one of their own."""
    if shards.dense == shards.experts:
        return sum(unit.whole(shards)) if shards.dense > 1 else 0
    dense, experts = (unit.elements - unit.experts) * shards.dense, unit.experts * shards.experts
    return max(dense if shards.dense > 1 else 0, experts if shards.experts > 1 else 0)


_NO_UNIT = UnitBytes(
    unsharded=0,
    all_gather_output=0,
    all_gather_input=0,
    gradients=0,
    newest=0,
    last_gradient=0,
    accumulated=0,
    reduce_scatter_input=0,
    gloo_copy=0,
    sharded_gradients=0,
)
"""The blocks of a module that has none: all of it is the root."""


class _Stack:
    """The blocks of one rank in the order they run, addressed by index among a pass's `blocks`."""

    def __init__(self, units: Sequence[tuple[float, UnitBytes]]) -> None:
        self._units = units or [(0.0, _NO_UNIT)]
        self._count = sum(repeats for repeats, _ in units)
        self._all_sharded_gradients = sum(repeats * unit.sharded_gradients for repeats, unit in units)

    @property
    def is_shared(self) -> bool:
        """True if one unit is used again and again, as ALBERT's: it is neither fetched ahead nor reduced in between."""
        return self._count <= 1

    @property
    def first(self) -> UnitBytes:
        return self._units[0][1]

    def unit(self, index: int, blocks: int) -> UnitBytes:
        """Return the unit of the block at an index, which counts from the end where it is negative."""
        position = (index % max(blocks, 1) + 0.5) * self._count / max(blocks, 1)
        for repeats, unit in self._units:
            if position < repeats:
                return unit
            position -= repeats
        return self._units[-1][1]

    def unsharded(self, first: int, blocks: int) -> float:
        """Bytes of the first so many blocks, unsharded."""
        return sum(share * unit.unsharded for share, unit in self._first(first, blocks))

    def accumulated(self, first: int, blocks: int) -> float:
        """Bytes of the whole gradients of the first so many blocks."""
        return sum(share * unit.accumulated for share, unit in self._first(first, blocks))

    def sharded_gradients(self, last: int, blocks: int) -> float:
        """Bytes of the sharded gradients of the last so many blocks."""
        if last == 0:
            return 0.0
        return self._all_sharded_gradients - sum(
            share * unit.sharded_gradients for share, unit in self._first(blocks - last, blocks)
        )

    def _first(self, blocks: int, of: int) -> Iterator[tuple[float, UnitBytes]]:
        left = self._count * blocks / max(of, 1)
        for repeats, unit in self._units:
            yield min(repeats, left), unit
            left -= min(repeats, left)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharding:
    """Traits of a job that buffers depend on besides the parameters and the recipe."""

    shards: Shards
    part: Part
    offloads: bool
    reshards: bool
    steps: int
    synchronised: bool
    replicated: bool
    by_gloo: bool
    refers: bool


def fsdp_buffers(job: Job, recipe: Recipe) -> FsdpBuffers:
    """Return the buffers of FSDP2 in a job."""
    chosen = job.configuration
    steps = chosen.gradient_accumulation_steps
    sharding = _Sharding(
        shards=shards_over(job),
        part=part_of(job),
        offloads=chosen.offload != "none",
        reshards=reshards_weights(job),
        steps=steps,
        synchronised=steps == 1 or reduces_each_micro_batch(job),
        replicated=chosen.dp_replicate > 1,
        by_gloo=job.cluster.device.is_cpu,
        refers=is_one_unit(job),
    )
    return _buffers(job.counts, sharding, recipe)


@lru_cache(maxsize=128)
def _buffers(counts: ParameterCounts, sharding: _Sharding, recipe: Recipe) -> FsdpBuffers:
    return FsdpBuffers(
        rank_units(counts, sharding.part),
        rank_units(counts.trained, sharding.part),
        rank_units(counts.held, sharding.part) if recipe.frozen is not None else None,
        sharding,
        recipe,
    )


class FsdpBuffers:
    """Unsharded units, whole gradients and reduction buffers of one job, at every moment but the optimizer's step."""

    def __init__(self, units: Units, trained: Units, held: Units | None, sharding: _Sharding, recipe: Recipe) -> None:
        self._recipe = recipe
        self._offloads, self._reshards = sharding.offloads, sharding.reshards
        self._steps, self._synchronised = sharding.steps, sharding.synchronised
        shards = sharding.shards
        self._by_gloo = sharding.by_gloo
        added = self._steps > 1 and self._synchronised
        self._keeps_all_reduced = sharding.replicated and (added or sharding.offloads)
        offloads = self._offloads
        if held is None:
            self._root = unit_bytes(units.root, trained.root, recipe, shards, offloads=offloads)
            blocks = [
                (unit.repeats, unit_bytes(unit, own, recipe, shards, offloads=offloads, width=recipe.block_gather))
                for unit, own in zip(units.blocks, trained.blocks, strict=True)
            ]
        else:
            bytes_of = partial(frozen_unit_bytes, recipe=recipe, shards=shards, offloads=offloads)
            self._root = bytes_of(trained.root, held.root, is_block=False)
            blocks = [
                (unit.repeats, bytes_of(unit, fixed, is_block=True))
                for unit, fixed in zip(trained.blocks, held.blocks, strict=True)
            ]
        self._reference = unsharded_reference(units, recipe, shards) if sharding.refers else (0.0, 0.0)
        self._blocks = _Stack(blocks)
        self._block_elements = sum(unit.repeats * unit.elements for unit in trained.blocks)
        self._accumulated = 0.0 if self._synchronised else trained.bytes(recipe.reduce)

    def at(self, instant: Instant) -> Ledger:
        """Gradients and buffers at one instant of the worst micro-batch."""
        if instant.phase != "backward":
            return Ledger(gradients=self._waiting, buffers=self._unsharded_in_forward(instant))
        if instant.leaves and (instant.blocks_done + 1 == instant.blocks or not self._blocks.is_shared):
            return self._reduction(instant)
        share = instant.blocks_done / max(instant.blocks, 1)
        of_root = max(instant.done_gradients - share * self._block_elements, 0.0)
        whole = self._whole(instant, of_root)
        unsharded, blocks_done = self._unsharded_in_backward(instant), instant.blocks_done
        sharded_gradients = self._sharded_gradients(blocks_done, instant.blocks)
        all_reduced = self._all_reduced(blocks_done, instant.blocks)
        reducing = (
            self._blocks.unit(-blocks_done, instant.blocks).reduce_scatter_input
            if blocks_done and not self._blocks.is_shared
            else 0.0
        )
        if self._synchronised:
            gradients = (sharded_gradients if self._steps == 1 else self._waiting) + whole
            return Ledger(gradients=gradients, buffers=unsharded + reducing + all_reduced)
        # The last micro-batch reduces what the others left; before that, gradients are added up where they are.
        buffers = unsharded + reducing + all_reduced
        last = Ledger(gradients=self._left(instant) + sharded_gradients + whole, buffers=buffers)
        added = self._accumulated if self._steps > 2 else self._accumulated - self._left(instant)
        return max(last, Ledger(gradients=added + whole, buffers=unsharded), key=lambda ledger: ledger.total)

    def _reduction(self, instant: Instant) -> Ledger:
        """Return what waits when a unit's parameters are freed: its whole gradients are not before they are copied."""
        blocks_done, blocks = instant.blocks_done, instant.blocks
        unit, share = self._blocks.unit(-blocks_done - 1, blocks), blocks_done / max(blocks, 1)
        of_root = max(instant.done_gradients - share * self._block_elements, 0.0)
        unsharded = self._unsharded_in_backward(instant) - unit.unsharded
        if self._synchronised:
            gradients = self._sharded_gradients(blocks_done, blocks) if self._steps == 1 else self._waiting
            gradients += self._recipe.gather * of_root + max(unit.gradients, self._reduced(unit, unit.last_gradient))
        else:
            of_root = 0.0 if self._recipe.gather == self._recipe.reduce else of_root
            gradients = (
                self._left(instant) + self._sharded_gradients(blocks_done, blocks) + self._recipe.gather * of_root
            )
        all_reduced = self._all_reduced(blocks_done, blocks)
        return Ledger(gradients=gradients, buffers=unsharded + unit.reduce_scatter_input + all_reduced)

    def before_blocks(self) -> Ledger:
        """Return the unsharded root, then the first block beside the root's buffer; hardly an activation is alive."""
        root, block = self._root, self._blocks.first
        beside = root.unsharded + root.all_gather_output + block.all_gather_peak
        return Ledger(gradients=self._waiting, buffers=max(root.all_gather_peak, beside))

    def after_backward(self) -> Ledger:
        """Return the root's reduction, after all others' and when no activation is left."""
        whole, last = self._root.gradients, self._root.last_gradient
        if not self._synchronised:
            whole, last = self._root.accumulated, last * self._recipe.reduce / self._recipe.gather
        sharded_gradients = self._waiting if self._synchronised and self._steps > 1 else self._sharded_gradients(1, 1)
        return Ledger(
            gradients=sharded_gradients + max(whole, self._reduced(self._root, last)),
            buffers=self._root.reduce_scatter_input + self._all_reduced(1, 1),
        )

    def _reduced(self, unit: UnitBytes, last_gradient: float) -> float:
        """Return what a unit's reduce-scatter has beside its input."""
        return unit.sharded_gradients + last_gradient + (unit.gloo_copy if self._by_gloo else 0)

    def _whole(self, instant: Instant, of_root: float) -> float:
        """Return gradients that are not reduced yet.

        Those of the dtype that is accumulated are added in place, so that only the newest is a tensor of its own.
        """
        if self._synchronised or self._recipe.gather != self._recipe.reduce:
            return self._recipe.gather * (of_root + instant.unit_gradients)
        unit = self._blocks.unit(-instant.blocks_done - 1, instant.blocks) if instant.unit == "block" else self._root
        return min(self._recipe.gather * instant.unit_gradients, unit.newest)

    def _sharded_gradients(self, blocks: int, of: int) -> float:
        """Sharded gradients of the last so many blocks; offload moves them away as they are made."""
        return 0.0 if self._offloads else self._blocks.sharded_gradients(blocks, of)

    def _all_reduced(self, blocks: int, of: int) -> float:
        """Return what was all-reduced of the last so many blocks, where that is not their gradients' own memory."""
        return self._blocks.sharded_gradients(blocks, of) if self._keeps_all_reduced else 0.0

    def _left(self, instant: Instant) -> float:
        """Accumulated gradients that are not reduced yet."""
        remaining = instant.blocks - instant.blocks_done
        return self._root.accumulated + self._blocks.accumulated(remaining, instant.blocks)

    @cached_property
    def _waiting(self) -> float:
        """Gradients of earlier micro-batches; offload has moved those that are sharded away."""
        if not self._synchronised:
            return self._accumulated
        if self._steps == 1 or self._offloads:
            return 0.0
        return self._sharded_gradients(1, 1) + self._root.sharded_gradients

    def _unsharded_in_forward(self, instant: Instant) -> float:
        """Return what is unsharded in forward.

        The last buffer stays until the next unit's is copied out, or until the root's forward, which has the loss,
        ends.
        """
        blocks_done, blocks = instant.blocks_done, instant.blocks
        if instant.unit == "reference":
            before = 0.0 if self._reshards else self._blocks.unsharded(blocks, blocks)
            return self._root.unsharded + before + sum(self._reference)
        if instant.unit == "head":
            before = 0.0 if self._reshards else self._blocks.unsharded(blocks, blocks)
            return self._root.unsharded + before + self._blocks.unit(-1, blocks).all_gather_output
        block, previous = (
            self._blocks.unit(blocks_done, blocks),
            self._blocks.unit(blocks_done - 1, blocks) if blocks_done else self._root,
        )
        before = 0.0 if self._reshards else self._blocks.unsharded(blocks_done, blocks)
        unsharded = (
            previous.all_gather_output + block.all_gather_peak
            if instant.enters
            else block.unsharded + block.all_gather_output
        )
        return self._root.unsharded + before + unsharded

    def _unsharded_in_backward(self, instant: Instant) -> float:
        """Return the root, the block at work, and, once that is copied out, the buffer of the block before it."""
        blocks = instant.blocks
        remaining = blocks - instant.blocks_done
        if not self._reshards:
            return self._root.unsharded + self._blocks.unsharded(remaining, blocks)
        if instant.unit == "head":
            last = self._blocks.unit(-1, blocks)
            return self._root.unsharded + last.all_gather_output
        if instant.unit == "table":
            following = self._blocks.unit(remaining - 1, blocks).all_gather_output if remaining > 0 else 0.0
            return self._root.unsharded + following
        if instant.enters:
            unit = self._blocks.unit(remaining - 1, blocks)
            return self._root.unsharded + unit.all_gather_output + unit.unsharded
        fetches = remaining > 1 and not self._blocks.is_shared
        ahead = self._blocks.unit(remaining - 2, blocks).all_gather_output if fetches else 0.0
        return self._root.unsharded + self._blocks.unit(remaining - 1, blocks).unsharded + ahead
