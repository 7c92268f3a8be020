"""Units: the parameters of one rank as the tensors they are, block by block and what is outside the blocks.

FSDP2 gathers and reduces a unit at a time. Every tensor is a storage of its own, which the caching allocator rounds up,
and FSDP2 pads its dimension 0 to a multiple of the shards; so bytes are sums over tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

from hardware_db.records import dataclass
from planner.cost.precision import Recipe
from planner.cost.split import kinds_on_stage
from planner.models.facts import BlockCount, ParameterCounts, Shape
from planner.types.job import Job

ALLOCATION_BYTES = 512
"""What torch's caching allocator rounds a block up to (`c10/cuda/CUDACachingAllocator`, kMinBlockSize)."""


def round_up(size: float) -> int:
    """Bytes of one storage, as the caching allocator gives them."""
    return -int(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Ranks over which a tensor is sharded: most of them, and those of routed experts.

    `evenly`: whether experts are cut in another dimension where there are fewer of them than ranks (torchtitan,
    `models/llama4/infra/parallelize.py`) rather than dealt out whole, which FSDP2 does by itself.
    """

    dense: int = 1
    experts: int = 1
    evenly: bool = False


class _Cached:
    """Gives slotted records the `__dict__` that `cached_property` writes to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit(_Cached):
    """The tensors of one unit.

    `repeats` like units are on the rank. `has_experts`: its three-dimensional tensors hold routed experts, one beside
    the other.
    """

    shapes: tuple[Shape, ...]
    repeats: float = 1
    has_experts: bool = False

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def elements(self) -> int:
        """Elements of its tensors together."""
        return sum(self.sizes)

    @cached_property
    def experts(self) -> int:
        """Elements that belong to routed experts."""
        if not self.has_experts:
            return 0
        return sum(size for shape, size in zip(self.shapes, self.sizes, strict=True) if len(shape) == _STACKED)

    def shard(self, shards: Shards) -> Unit:
        """Return the unit on the rank with the most of dimension 0 of each tensor, as `fully_shard` chunks it."""
        shapes = tuple(_shard(shape, ways, evenly=even) for shape, (ways, even) in self._ways(shards))
        return replace(self, shapes=shapes)

    def whole(self, shards: Shards) -> tuple[int, ...]:
        """Elements of each tensor all-gathered, where this unit is a shard of it."""
        return tuple(size * ways for size, (_, (ways, _)) in zip(self.sizes, self._ways(shards), strict=True))

    def _ways(self, shards: Shards) -> Iterator[tuple[Shape, tuple[int, bool]]]:
        for shape in self.shapes:
            is_expert = self.has_experts and len(shape) == _STACKED
            yield shape, (shards.experts, shards.evenly) if is_expert else (shards.dense, False)

    def bytes(self, width: float) -> int:
        """Bytes of one unit, each tensor a storage."""
        if width not in self._bytes:
            self._bytes[width] = sum(round_up(size * width) for size in self.sizes)
        return self._bytes[width]

    def loaded_bytes(self, recipe: Recipe) -> int:
        """Bytes of a frozen block, whose matrices may be quantised."""
        narrow = recipe.frozen_width if recipe.quantised is None else recipe.quantised
        widths = (narrow if len(shape) == 2 else recipe.frozen_width for shape in self.shapes)
        return sum(round_up(size * width) for size, width in zip(self.sizes, widths, strict=True))

    @cached_property
    def _bytes(self) -> dict[float, int]:
        return {}


_STACKED = 3
"""Dimensions of a tensor of all experts: [experts, outputs, inputs]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units(_Cached):
    """All parameters of one rank: the blocks in the order they run, and the root around them.

    The root's first `tables` tensors are the embedding's, which come before the blocks.
    """

    blocks: tuple[Unit, ...]
    root: Unit
    tables: int

    @cached_property
    def every(self) -> tuple[Unit, ...]:
        """The units of blocks, then the root."""
        return (*self.blocks, self.root)

    @property
    def embedding(self) -> tuple[int, ...]:
        """Elements of each tensor of the embedding."""
        return self.root.sizes[: self.tables]

    @property
    def ending(self) -> tuple[int, ...]:
        """Elements of each tensor after the blocks."""
        return self.root.sizes[self.tables :]

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(max(unit.sizes, default=0) for unit in self.every)

    @cached_property
    def elements(self) -> float:
        """Elements of all units together."""
        return sum(unit.repeats * unit.elements for unit in self.every)

    @cached_property
    def experts(self) -> float:
        """Elements that belong to routed experts."""
        return sum(unit.repeats * unit.experts for unit in self.blocks)

    @cached_property
    def in_blocks(self) -> float:
        """Elements of the blocks."""
        return sum(unit.repeats * unit.elements for unit in self.blocks)

    @cached_property
    def largest_block(self) -> int:
        """Elements of the largest block."""
        return max((unit.elements for unit in self.blocks), default=0)

    def shard(self, shards: Shards) -> Units:
        """Return the units sharded, on the rank with the most."""
        blocks = tuple(unit.shard(shards) for unit in self.blocks)
        return Units(blocks=blocks, root=self.root.shard(shards), tables=self.tables)

    def bytes(self, width: float) -> float:
        """Return the bytes of all tensors at `width` bytes each element."""
        return sum(unit.repeats * unit.bytes(width) for unit in self.every)

    def flat_bytes(self, width: float) -> float:
        """Bytes where each unit is one storage."""
        return sum(unit.repeats * round_up(unit.elements * width) for unit in self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The part of a model that one rank has: its degrees, and its stage of the pipeline.

    `whole_experts`: tp leaves routed experts whole, as it does where no plan of the model names them.
    """

    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    layers: tuple[int, ...] = ()
    """Blocks of each stage as the plan names them."""
    stage: int = 0
    ep: int = 1
    whole_experts: bool = False


def part_of(job: Job) -> Part:
    """Return the part of the job's model that a rank of its stage has."""
    chosen = job.configuration
    return Part(
        tp=chosen.tp,
        pp=chosen.pp,
        virtual_stages=chosen.virtual_stages,
        layers=chosen.stage_layers,
        stage=job.stage,
        ep=chosen.ep,
        whole_experts=job.facts.kind == "custom",
    )


def shards_over(job: Job) -> Shards:
    """Return the ranks over which the job's strategy shards."""
    chosen = job.configuration
    return Shards(dense=chosen.state_shards, experts=chosen.expert_shards, evenly=job.workload.code == "torchtitan")


def units_of(job: Job) -> Units:
    """Return the units of one rank of the job's pipeline stage."""
    return rank_units(job.counts, part_of(job))


def trained_units_of(job: Job) -> Units:
    """Return the units of a rank without frozen weights."""
    return rank_units(job.counts.trained, part_of(job))


def rank_units(counts: ParameterCounts, part: Part) -> Units:
    """Return the units by the part of the model that the rank has."""
    return _units(counts, part, Shards())


def shards_of(job: Job) -> Units:
    """Return the units as data parallelism shards them, on the rank with the most."""
    return _units(job.counts, part_of(job), shards_over(job))


def trained_shards_of(job: Job) -> Units:
    """Return the sharded units without frozen weights."""
    return _units(job.counts.trained, part_of(job), shards_over(job))


def weight_bytes(job: Job, recipe: Recipe, *, sharded: bool) -> float:
    """Return bytes of the weights on one rank, each tensor a storage.

    Trained ones are as the recipe keeps them, frozen ones as they were loaded.
    """
    part, shards = part_of(job), shards_over(job) if sharded else Shards()
    if recipe.frozen is None:
        return _units(job.counts, part, shards).bytes(recipe.weight)
    held = _units(job.counts.held, part, shards)
    blocks = sum(unit.repeats * unit.loaded_bytes(recipe) for unit in held.blocks)
    return _units(job.counts.trained, part, shards).bytes(recipe.weight) + blocks + held.root.bytes(recipe.frozen)


def mean_width(job: Job, recipe: Recipe) -> float:
    """Bytes of a weight, frozen or not, on average."""
    if recipe.frozen is None:
        return recipe.weight
    return weight_bytes(job, recipe, sharded=False) / max(units_of(job).elements, 1)


@lru_cache(maxsize=512)
def _units(counts: ParameterCounts, part: Part, shards: Shards) -> Units:
    in_order = sorted(counts.blocks, key=lambda block: block.name != "vision")  # image towers run first, count last
    kinds = tuple((block.name, block.repeats) for block in in_order)
    repeats = kinds_on_stage(kinds, pp=part.pp, virtual_stages=part.virtual_stages, stage=part.stage, named=part.layers)
    blocks = tuple(
        Unit(
            shapes=tuple(_on_rank(shape, part, is_expert=bool(block.experts)) for shape in _shapes(block)),
            repeats=count,
            has_experts=bool(block.experts),
        )
        for block, count in zip(in_order, repeats, strict=True)
        if count
    )
    outside, tables = _outside(counts, part)
    # Of the tables that make up the embedding the vocabulary's is split; positions are on every tp rank.
    root = Unit(
        shapes=tuple(
            shape if 0 < index < tables else _on_rank(shape, part, is_expert=False)
            for index, shape in enumerate(outside)
        )
    )
    units = Units(blocks=blocks, root=root, tables=tables)
    return units if shards == Shards() else units.shard(shards)


def _shapes(block: BlockCount) -> tuple[Shape, ...]:
    return block.shapes or _whole(block.parameters)


def _on_rank(shape: Shape, part: Part, *, is_expert: bool) -> Shape:
    """Return the shape of a tensor as a rank has it.

    Vectors (norms, biases) are on every tp rank; of the biases those of column-parallel products are not, which is a
    thousandth of a block. Experts that are spread over ranks are whole there.
    """
    if is_expert and len(shape) == _STACKED:
        if part.ep > 1:
            return _shard(shape, part.ep)
        if part.whole_experts:
            return shape
        return (shape[0], -(-shape[1] // part.tp), shape[2])
    is_vector = len(shape) < 2 and prod(shape) <= _NO_VECTOR
    return shape if is_vector else _shard(shape, part.tp)


_NO_VECTOR = 1 << 20
"""Elements from which on a shape of one dimension is a sum of weights that are not known by themselves."""


def _outside(counts: ParameterCounts, part: Part) -> tuple[tuple[Shape, ...], int]:
    """Weights outside the blocks on a rank, and how many of the tensors make up the embedding.

    In a pipeline the first stage has the embedding and the last one what comes after the blocks, a head that is tied to
    the token table with a copy of that.
    """
    outside = counts.outside
    tables = sum(1 for size in accumulate(map(prod, outside)) if size <= counts.embedding)
    first, last = part.stage == 0, part.stage == part.pp - 1
    if part.pp == 1:
        return outside or _whole(counts.outside_blocks), tables
    if not outside:
        ending = counts.head + counts.other if counts.head else counts.embedding + counts.other
        return (_whole(counts.embedding), 1) if first else (_whole(ending) if last else (), 0)
    if first:
        return outside[:tables], tables
    if not last:
        return (), 0
    tied = outside[: min(tables, 1)] if counts.head == 0 else ()
    return (*tied, *outside[tables:]), 0


def _whole(elements: int) -> tuple[Shape, ...]:
    """Weights of which only the sum is known, as one tensor."""
    return ((elements,),) if elements else ()


def _shard(shape: Shape, shards: int, *, evenly: bool = False) -> Shape:
    if not shape or shards == 1:
        return shape
    if evenly and shape[0] < shards:
        return (1, -(-prod(shape[:2]) // shards), *shape[2:])
    return (-(-shape[0] // shards), *shape[1:])
