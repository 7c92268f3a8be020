"""Parameter counts of a model by component."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCount:
    """`repeats` consecutive transformer blocks of `parameters` each, of which `experts` belong to routed experts.

    `name` is what the blocks are: `decoder`, `encoder`, `dense` and `moe` (the two kinds of layer in a mixture of
    experts), `vision`, `text`. `largest_matrix` is the largest single weight tensor of the block, elements. Blocks that
    share one set of weights (ALBERT) are one block with `repeats` 1. `shapes` are those of one block's weights, in
    the order of use as far as it matters; empty where only their sum is known.
    """

    name: str
    repeats: int
    parameters: int
    experts: int = 0
    largest_matrix: int = 0
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters of a model by component; weights that are tied count once, where they are first used.

    `embedding`: token, position and type tables and patch projections; `head`: the untied part of the output head;
    `other`: final norms, poolers, relative-position tables and the like. `outside` are the shapes of these weights,
    the embedding's first and the head's last; empty where only their sum is known.
    """

    embedding: int
    blocks: tuple[BlockCount, ...]
    head: int
    other: int
    outside: tuple[Shape, ...] = ()

    @property
    def in_blocks(self) -> int:
        return sum(block.parameters * block.repeats for block in self.blocks)

    @property
    def total(self) -> int:
        return self.embedding + self.in_blocks + self.head + self.other

    @property
    def largest_block(self) -> int:
        return max((block.parameters for block in self.blocks), default=0)

    @property
    def outside_blocks(self) -> int:
        """Parameters of the root unit that FSDP makes of everything outside the blocks."""
        return self.embedding + self.head + self.other
