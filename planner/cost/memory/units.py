"""Units: the parameters of one rank as the tensors they are, block by block and what is outside the blocks.

FSDP2 gathers and reduces a unit at a time. Every tensor is a storage of its own, which the caching allocator rounds up,
and FSDP2 pads its dimension 0 to a multiple of the shards; so bytes are sums over tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod

from planner.cost.precision import Recipe
from planner.models.facts import ParameterCounts, Shape
from planner.types.job import Job

ALLOCATION_BYTES = 512
"""What torch's caching allocator rounds a block up to (`c10/cuda/CUDACachingAllocator`, kMinBlockSize)."""


def rounded(size: float) -> int:
    """Bytes of one storage, as the caching allocator gives them."""
    return -int(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The tensors of one unit; `repeats` like units are on the rank, a fraction where pipeline stages differ."""

    shapes: tuple[Shape, ...]
    repeats: float = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(map(prod, self.shapes))

    @cached_property
    def elements(self) -> int:
        return sum(self.sizes)

    def shard(self, shards: int) -> Unit:
        """The rank with the most of dimension 0 of each tensor, as `fully_shard` chunks it."""
        return Unit(shapes=tuple(_shard(shape, shards) for shape in self.shapes), repeats=self.repeats)

    def bytes(self, width: float) -> int:
        """Bytes of one unit, each tensor a storage."""
        if width not in self._bytes:
            self._bytes[width] = sum(rounded(size * width) for size in self.sizes)
        return self._bytes[width]

    def loaded_bytes(self, recipe: Recipe) -> int:
        """Bytes of a frozen block, whose matrices may be quantised."""
        narrow = recipe.frozen_width if recipe.quantised is None else recipe.quantised
        widths = (narrow if len(shape) == 2 else recipe.frozen_width for shape in self.shapes)
        return sum(rounded(size * width) for size, width in zip(self.sizes, widths, strict=True))

    @cached_property
    def _bytes(self) -> dict[float, int]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Units:
    """All parameters of one rank: the blocks in the order they run, and the root around them.

    The root's first `tables` tensors are the embedding's, which come before the blocks.
    """

    blocks: tuple[Unit, ...]
    root: Unit
    tables: int

    @cached_property
    def every(self) -> tuple[Unit, ...]:
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
        return sum(unit.repeats * unit.elements for unit in self.every)

    def shard(self, shards: int) -> Units:
        blocks = tuple(unit.shard(shards) for unit in self.blocks)
        return Units(blocks=blocks, root=self.root.shard(shards), tables=self.tables)

    def bytes(self, width: float) -> float:
        return sum(unit.repeats * unit.bytes(width) for unit in self.every)

    def flat_bytes(self, width: float) -> float:
        """Bytes where each unit is one storage."""
        return sum(unit.repeats * rounded(unit.elements * width) for unit in self.every)


def units_of(job: Job) -> Units:
    """The units of the largest pipeline stage on one tensor-parallel rank."""
    return rank_units(job.counts, job.configuration.tp, job.configuration.pp)


def trained_units_of(job: Job) -> Units:
    """The same without frozen weights."""
    return rank_units(job.counts.trained, job.configuration.tp, job.configuration.pp)


def rank_units(counts: ParameterCounts, tp: int, pp: int) -> Units:
    """The same by the degrees that split the model."""
    return _units(counts, tp, pp, 1)


def shards_of(job: Job) -> Units:
    """The same as data parallelism shards them, on the rank with the most."""
    return _units(job.counts, job.configuration.tp, job.configuration.pp, job.configuration.dp_shard)


def trained_shards_of(job: Job) -> Units:
    """The same without frozen weights."""
    return _units(job.counts.trained, job.configuration.tp, job.configuration.pp, job.configuration.dp_shard)


def weight_bytes(job: Job, recipe: Recipe, *, sharded: bool) -> float:
    """Bytes of the weights on one rank, each tensor a storage: trained ones as the recipe keeps them, frozen ones as
    they were loaded."""
    shards = job.configuration.dp_shard if sharded else 1
    tp, pp = job.configuration.tp, job.configuration.pp
    if recipe.frozen is None:
        return _units(job.counts, tp, pp, shards).bytes(recipe.weight)
    held = _units(job.counts.held, tp, pp, shards)
    blocks = sum(unit.repeats * unit.loaded_bytes(recipe) for unit in held.blocks)
    return _units(job.counts.trained, tp, pp, shards).bytes(recipe.weight) + blocks + held.root.bytes(recipe.frozen)


def mean_width(job: Job, recipe: Recipe) -> float:
    """Bytes of a weight, frozen or not, on average."""
    if recipe.frozen is None:
        return recipe.weight
    return weight_bytes(job, recipe, sharded=False) / max(units_of(job).elements, 1)


@lru_cache(maxsize=256)
def _units(counts: ParameterCounts, tp: int, pp: int, shards: int) -> Units:
    layers = sum(block.repeats for block in counts.blocks) or 1
    share = -(-layers // pp) / layers
    in_order = sorted(counts.blocks, key=lambda block: block.name != "vision")  # image towers run first, count last
    blocks = tuple(
        Unit(shapes=_parallel(block.shapes or _whole(block.parameters), tp), repeats=block.repeats * share)
        for block in in_order
    )
    root = Unit(shapes=_parallel(_outside(counts, pp), tp))
    return Units(blocks=blocks, root=root, tables=_tables(counts)).shard(shards)


def _tables(counts: ParameterCounts) -> int:
    """How many of the tensors outside the blocks make up the embedding."""
    elements = accumulate(prod(shape) for shape in counts.outside)
    return sum(1 for size in elements if size <= counts.embedding)


def _outside(counts: ParameterCounts, stages: int) -> tuple[Shape, ...]:
    """Weights outside the blocks; of a pipeline, those of the larger end, as one tensor."""
    if stages == 1:
        return counts.outside or _whole(counts.outside_blocks)
    if counts.head == 0:  # a tied head needs the table on both end stages
        return ((counts.embedding + counts.other,),)
    return ((max(counts.embedding, counts.head + counts.other),),)


def _whole(elements: int) -> tuple[Shape, ...]:
    """Weights of which only the sum is known, as one tensor."""
    return ((elements,),) if elements else ()


def _parallel(shapes: Iterable[Shape], degree: int) -> tuple[Shape, ...]:
    return tuple(_shard(shape, degree) for shape in shapes)


def _shard(shape: Shape, shards: int) -> Shape:
    return (-(-shape[0] // shards), *shape[1:]) if shape else shape
