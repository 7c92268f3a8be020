"""Units: the parts of a model whose weights are all-gathered together, and one unit's life during a step.

A unit is a repeated block; the root unit has everything else (embeddings, final norm, head) and what blocks share.
Its weights are whole from the moment it is needed until its use is over:

    sharded --begin_all_gather--> arriving --need--> whole --release--> sharded

While a unit is sharded its parameters have their shapes but read as NaN and take no memory. Whole weights lie in a
storage that keeps its identity: it is emptied on release and filled again before backward, so that what autograd saved
of them (a transposed view, say) is valid again then. torch's FSDP does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from strategies.backends.zero.collectives import Arrival
from strategies.backends.zero.flat_shard import Bucket
from strategies.backends.zero.weights import ShardingContext
from strategies.parallel.blocks import repeated_blocks


class State(Enum):
    """Of a unit's weights."""

    SHARDED = "sharded"
    ARRIVING = "arriving"
    WHOLE = "whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """A unit's module and the parameters that belong to it and to no other, by name."""

    module: nn.Module
    named: Sequence[tuple[str, nn.Parameter]]
    is_root: bool = False


class Unit:
    """One unit's weights. `has_fixed`: some are not trained, so that no gradient marks the end of their use."""

    def __init__(
        self, members: Members, buckets: Iterable[Bucket], fixed: Iterable[Bucket], context: ShardingContext
    ) -> None:
        self.module, self.is_root = members.module, members.is_root
        self.trained, self.has_fixed = tuple(buckets), bool(fixed := tuple(fixed))
        self.buckets = (*self.trained, *fixed)
        self.state = State.SHARDED
        self._context = context
        self._arrivals: list[Arrival] = []
        for bucket in self.buckets:
            _empty(bucket)

    def train(self, bucket: Bucket) -> None:
        """Train a bucket from now on that was fixed."""
        self.trained = (*self.trained, bucket)
        self.has_fixed = len(self.trained) < len(self.buckets)

    def begin_all_gather(self) -> None:
        """Ask for the weights; nothing where they are there or under way."""
        if self.state is not State.SHARDED:
            return
        with torch.profiler.record_function("dsplan::gather"), self._context.offload.beside() as copied:
            for bucket in self.buckets:
                storage = bucket.whole.untyped_storage()
                storage.resize_(bucket.layout.padded * bucket.whole.element_size())
                own = bucket.whole[bucket.layout.own_slice]
                own.copy_(bucket.part, non_blocking=True)  # from the host, or from a wider master
                collectives = self._context.collectives_of(bucket.kind)
                self._arrivals.append(collectives.all_gather(bucket.whole, own, bucket.layout))
            self._arrivals += copied
        self.state = State.ARRIVING

    def need(self) -> None:
        """Wait for the weights, which are used now."""
        self.begin_all_gather()
        if self.state is not State.ARRIVING:
            return
        with torch.profiler.record_function("dsplan::wait_for_weights"):
            for arrival in self._arrivals:
                arrival.wait()
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.place(bucket.whole)
        self.state = State.WHOLE

    def release(self) -> None:
        """Free the weights, which are not used any more for now."""
        if self.state is State.ARRIVING:
            self.need()  # what was asked for must be received
        if self.state is State.WHOLE:
            for bucket in self.buckets:
                _empty(bucket)
            self.state = State.SHARDED


def _empty(bucket: Bucket) -> None:
    """Free the whole weights; the parameters keep shape and dtype."""
    nothing = bucket.whole.new_full((), torch.nan) if bucket.dtype.is_floating_point else bucket.whole.new_zeros(())
    for slot in bucket.slots:
        slot.parameter.data = nothing.expand(slot.parameter.shape)
    bucket.whole.untyped_storage().resize_(0)


def members_of(model: nn.Module) -> list[Members]:
    """Return the units of a model, the root first; a parameter that several blocks use belongs to the root."""
    blocks = [block for block in repeated_blocks(model) if block is not model]
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for block in dict.fromkeys(blocks):
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    # Modules outside the blocks that use a block's parameter (tied weights) need it when the block does not.
    outside = {parameter for module in _outside(model, set(blocks)) for parameter in module.parameters(recurse=False)}
    shared = {parameter for parameter in inside if len(owners[parameter]) > 1 or parameter in outside}
    named = list(model.named_parameters())
    own = [(name, parameter) for name, parameter in named if parameter not in inside or parameter in shared]
    units = [Members(module=model, named=own, is_root=True)]
    for block in dict.fromkeys(blocks):
        mine = set(block.parameters()) - shared
        units.append(Members(module=block, named=[(n, p) for n, p in named if p in mine]))
    return units


def _outside(module: nn.Module, blocks: set[nn.Module]) -> Iterable[nn.Module]:
    """Yield the modules of a model that are in none of its blocks."""
    if module in blocks:
        return
    yield module
    for child in module.children():
        yield from _outside(child, blocks)
