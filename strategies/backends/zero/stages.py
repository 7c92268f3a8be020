"""Stage 3: weights are sharded too, and whole only while their unit is at work.

Forward gathers a unit before its module runs and frees it after; backward gathers it again before the first gradient
reaches it and frees it when its gradients are made. The next unit of the recorded order is asked for as soon as one
begins, so that its weights travel while this one computes. Parameters up to a threshold stay whole, as in stage 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.backends.zero.engine import ZeroStrategy
from strategies.backends.zero.flat_shard import Bucket, Named, Owners
from strategies.backends.zero.gradient_reducer import Reducer
from strategies.backends.zero.sharded_model import ShardedModel, buckets_for, unsharded_buckets
from strategies.backends.zero.unit_all_gather import Members, State, Unit, members_of
from strategies.backends.zero.weights import ShardingContext, awaken, load, settle_rest, take_over
from strategies.distributed.gathers import ModelHook, note_gathers
from strategies.torch_compat.tensors import tree_leaves

# Stage 1: optimizer states are sharded; weights are whole, and gradients until the step's only reduction.


class ZeroStage1(ZeroStrategy):
    """Adds gradients up on every rank; the step's last backward pass reduces bucket by bucket and frees them."""

    reduces_each_micro_batch = False

    def shard_model(self, model: nn.Module, context: ShardingContext) -> ShardedModel:
        """Keep all weights whole."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buckets = unsharded_buckets(named, context)
        settle_rest(model, {parameter for _, parameter in named}, context)
        return ShardedModel(buckets, context)


# Stage 2: gradients are sharded too: each micro-batch's are reduced over ranks and freed while backward continues.


class ZeroStage2(ZeroStage1):
    """Adds up this rank's part of the gradients; no rank ever holds more of the rest than two buckets."""

    reduces_each_micro_batch = True


class ZeroStage3(ZeroStrategy):
    """Holds a rank's part of everything, and the weights of two units at a time."""

    reduces_each_micro_batch = True

    def shard_model(self, model: nn.Module, context: ShardingContext) -> ShardedModel:
        """Shard all weights but small ones."""
        if context.collectives.ranks.world_size == 1 and not context.offload.weights:
            # All of it is this rank's part.
            return ZeroStage2(self.configuration, self.environment).shard_model(model, context)
        threshold = context.settings.persistence_threshold
        members = members_of(model)
        small = [
            (name, parameter)
            for unit in members
            for name, parameter in unit.named
            if parameter.requires_grad and parameter.numel() <= threshold
        ]
        unsharded = unsharded_buckets(small, context)
        unsharded_parameters = {parameter for _, parameter in small}
        units = [_unit(member, unsharded_parameters, context) for member in members]
        settle_rest(model, set(model.parameters()), context)
        return ShardedWeights(unsharded, [unit for unit in units if unit.buckets or unit.is_root], context)


STAGES: Mapping[int, type[ZeroStrategy]] = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


def _unit(members: Members, unsharded: set[nn.Parameter], context: ShardingContext) -> Unit:
    """Return a unit, with buckets of those that are trained and of the frozen ones, which have no gradients."""
    sharded = [(name, parameter) for name, parameter in members.named if parameter not in unsharded]
    buckets: dict[bool, list[Bucket]] = {}
    for trains in (True, False):
        named = [(name, parameter) for name, parameter in sharded if parameter.requires_grad is trains]
        buckets[trains] = buckets_for(named, context)
        for bucket in buckets[trains]:
            load(bucket, context, trains=trains, keeps=False)
    return Unit(members, buckets[True], buckets[False], context)


class ShardedWeights(ShardedModel):
    """Follows forward and backward through the model, gathering units before they are used and freeing them after."""

    def __init__(self, unsharded: list[Bucket], units: list[Unit], context: ShardingContext) -> None:
        trained = [bucket for unit in units for bucket in unit.trained]
        fixed = [bucket for unit in units for bucket in unit.buckets if bucket not in unit.trained]
        self._unsharded, self._units = unsharded, units
        super().__init__([*unsharded, *trained], context, fixed)
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._unmade: dict[Unit, int] = {}
        self._in_backward = False
        self._order: tuple[Unit, ...] = ()  # of the last forward pass, which the next one is expected to follow
        self._seen: list[Unit] = []
        for unit in units:
            unit.module.register_forward_pre_hook(ModelHook(partial(self._before_forward, unit)), prepend=True)
            unit.module.register_forward_hook(ModelHook(partial(self._after_forward, unit)), always_call=True)
        if any(unit.buckets for unit in units):
            note_gathers([unit.module for unit in units if unit.buckets or unit.is_root], self._is_sharded)

    def admit(self, named: Sequence[Named], owners: Owners) -> Sequence[Bucket]:
        """Train the buckets of frozen parameters, which are sharded already, with all that lies in them."""
        bucket_of = {slot.parameter: bucket for bucket in self.fixed for slot in bucket.slots}
        woken = tuple(dict.fromkeys(bucket_of[p] for _, p in named if p in bucket_of))
        for bucket in woken:
            awaken(bucket, self.context)
            self._unit_of[bucket].train(bucket)
        self.fixed = tuple(bucket for bucket in self.fixed if bucket not in woken)
        self.trained = (*self.trained, *woken)
        trained = {slot.parameter for bucket in self.trained for slot in bucket.slots}
        return *woken, *self._keep([(name, p) for name, p in named if p not in trained], owners)

    def follow(self, reducer: Reducer) -> None:
        """Free a unit's weights when the reducer has all its gradients."""
        reducer.when_made = self._gradients_made

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Keep units open inside until their gradients are made."""
        self._in_backward = True
        self._unmade = {unit: len(unit.trained) for unit in self._units}
        try:
            yield
        finally:
            self._in_backward = False
            self._release_all()

    def unsharded(self) -> Sequence[Bucket]:
        """Return the buckets of small parameters."""
        return self._unsharded

    def renewed(self) -> None:
        """Free weights that were unsharded before the step: they are out of date."""
        super().renewed()
        self._release_all()

    @contextmanager
    def whole(self, *, keeps_changes: bool) -> Iterator[None]:
        """All-gather all units inside."""
        for unit in self._units:
            unit.need()
        # A module that runs inside must not free what is open.
        pinned, self._in_backward = self._in_backward, True
        try:
            yield
            if keeps_changes:
                for bucket in (*self.trained, *self.fixed):
                    take_over(bucket, bucket.whole, self.context)
        finally:
            self._in_backward = pinned
            self._release_all()

    def copies(self, parameters: set[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return whole weights in host memory, unit after unit; every rank calls this together."""
        copied: dict[nn.Parameter, torch.Tensor] = {}
        for unit in self._units:
            sharded = unit.state is not State.WHOLE
            unit.need()
            for bucket in unit.buckets:
                for slot in bucket.slots:
                    if slot.parameter in parameters:
                        copied[slot.parameter] = slot.parameter.detach().to("cpu", copy=True)
            if sharded:
                unit.release()
        return copied

    def _is_sharded(self, module: nn.Module) -> bool:
        return any(unit.buckets and unit.state is State.SHARDED for unit in self._units)

    def _before_forward(self, unit: Unit, module: nn.Module, inputs: Any) -> None:
        if unit.is_root and not self._in_backward:
            if self._seen:
                self._order = tuple(self._seen)
            self._seen = []
        unit.need()
        if not self._in_backward:
            self._seen.append(unit)
            self._prefetch(unit, self._order, len(self._seen))

    def _prefetch(self, unit: Unit, order: tuple[Unit, ...], number: int) -> None:
        """Ask for the unit that came after this one the last time."""
        if number < len(order) and order[number - 1] is unit:
            order[number].begin_all_gather()

    def _after_forward(self, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._in_backward:
            return  # activation checkpointing computes the unit again; its weights are needed until its gradients are
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and results:
            number = len(self._seen) if not unit.is_root else 0
            begins = partial(self._before_backward, unit, number)
            torch.autograd.graph.register_multi_grad_hook(results, begins, mode="any")
            if unit.is_root:
                return  # it is the first that backward needs
        elif torch.is_grad_enabled() and output is not None and unit.trained:
            return  # no hook reports when backward reaches it: leave it unsharded
        unit.release()

    def _before_backward(self, unit: Unit, number: int, gradient: torch.Tensor) -> None:
        unit.need()
        if unit.is_root or not self._in_backward:
            return
        # What ran later in forward is done with; a unit whose gradients are all made has been freed before.
        for later in self._seen[number:]:
            if later is not unit:
                later.release()
        if number >= 2:
            self._seen[number - 2].begin_all_gather()

    def _gradients_made(self, bucket: Bucket) -> None:
        """Free a trained unit when its last gradient is made: whatever reads such a weight makes a gradient of it."""
        unit = self._unit_of.get(bucket)
        if unit is None or not self._in_backward:
            return
        self._unmade[unit] -= 1
        if self._unmade[unit] == 0 and not unit.has_fixed:
            unit.release()

    def _release_all(self) -> None:
        for unit in self._units:
            unit.release()
