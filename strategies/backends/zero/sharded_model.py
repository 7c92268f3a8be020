"""The model as a stage shards it, in buckets whose weights are whole or sharded between uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strategies.backends.zero.flat_shard import Bucket, Named, Owners, Slot, buckets_of
from strategies.backends.zero.gradient_reducer import Reducer
from strategies.backends.zero.optimizer import Pieces
from strategies.backends.zero.weights import Publisher, ShardingContext, load, take_over
from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import Place, States


class ShardedModel:
    """A model's buckets as a stage shards them: here, all weights are unsharded on every rank.

    `trained` are the buckets whose parameters require gradients, `fixed` others that are sharded as well.
    """

    def __init__(self, trained: Sequence[Bucket], context: ShardingContext, fixed: Sequence[Bucket] = ()) -> None:
        self.trained, self.fixed, self.context = tuple(trained), tuple(fixed), context
        self.weights = Publisher(context, self.unsharded())

    def unsharded(self) -> Sequence[Bucket]:
        """Return the trained buckets whose weights are unsharded on every rank between steps."""
        return self.trained

    def admit(self, named: Sequence[Named], owners: Owners) -> Sequence[Bucket]:
        """Train parameters from now on; return their new buckets, in which `owners` step whole tensors."""
        return self._keep(named, owners)

    def _keep(self, named: Sequence[Named], owners: Owners) -> Sequence[Bucket]:
        """Return new buckets whose weights are whole on every rank."""
        buckets = unsharded_buckets(named, replace(self.context, owners=owners))
        self.trained = (*self.trained, *buckets)
        self.weights.also(buckets)
        return buckets

    def follow(self, reducer: Reducer) -> None:
        """Let the stage listen to when gradients are made; called once."""

    def backward(self) -> AbstractContextManager[object]:
        """Return what surrounds a backward pass."""
        return nullcontext()

    def renew(self, bucket: Bucket) -> None:
        """Begin to bring a bucket's weights up to date on every rank, with its master that the optimizer changed."""
        self.weights.renew(bucket)

    def renewed(self) -> None:
        """Wait for the weights, when it has changed all of them."""
        self.weights.finish()

    def updated(self) -> None:
        """Bring all weights up to date on every rank, when the masters have changed."""
        for bucket in self.trained:
            self.renew(bucket)
        self.renewed()

    @contextmanager
    def whole(self, *, keeps_changes: bool) -> Iterator[None]:
        """All weights whole inside; `keeps_changes` takes over what rank 0 wrote to them."""
        yield
        if keeps_changes:
            for bucket in self.trained:
                take_over(bucket, bucket.whole, self.context)

    def copies(self, parameters: set[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Return whole copies of those parameters that are sharded between uses; every rank calls this together."""
        return {}


def unsharded_buckets(named: Sequence[Named], context: ShardingContext) -> list[Bucket]:
    """Return buckets whose weights stay whole on every rank while their optimizer states are sharded."""
    buckets = buckets_for(named, context)
    for bucket in buckets:
        load(bucket, context, trains=True, keeps=True)
    return buckets


def buckets_for(named: Sequence[Named], context: ShardingContext) -> list[Bucket]:
    """Return parameters in buckets of the dtypes that they compute in, each of one kind."""
    dtypes = {parameter: context.settings.weights(parameter.dtype) for _, parameter in named}
    buckets: list[Bucket] = []
    for kind in dict.fromkeys(context.kind_of(parameter) for _, parameter in named):
        alike = [member for member in named if context.kind_of(member[1]) == kind]
        ranks = context.collectives_of(kind).ranks
        for bucket in buckets_of(alike, ranks, dtypes, context.settings.bucket, context.owners):
            bucket.kind = kind
            buckets.append(bucket)
    return buckets


# Checkpoint content: the rank's pieces of whole named tensors, from the master weights.


class ZeroStates(States):
    """A module in buckets and an optimizer of pieces."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, pieces: Pieces, sharded_model: ShardedModel
    ) -> None:
        super().__init__(module, optimizer)
        self._pieces, self._sharded_model = pieces, sharded_model
        self._runs: dict[torch.Tensor, PartOfTensor] = {}
        for bucket, slot in pieces.slots():
            piece = pieces.of[slot.parameter].detach().reshape(-1)
            self._runs[slot.parameter] = self._run(bucket, slot, piece)
        for bucket in sharded_model.fixed:
            for slot in bucket.slots:
                start, stop = bucket.own_range(slot)
                self._runs[slot.parameter] = self._run(bucket, slot, bucket.part[start:stop])

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank writes its run: of several copies of the states the first does."""
        replicas = self._sharded_model.context.replicas
        return (replicas is None or replicas.ranks.rank == 0) and super().writes(tensor)

    def _run(self, bucket: Bucket, slot: Slot, run: torch.Tensor) -> PartOfTensor:
        parameter = slot.parameter
        return PartOfTensor.of_run(
            run,
            self.shape_of(parameter),
            bucket.own_start(slot),
            split=self.split_of(parameter),
            writes=self.writes(parameter),
        )

    def weight(self, tensor: torch.Tensor) -> Any:
        """Return this rank's part of a parameter, or the whole of what is not sharded."""
        return self._runs[tensor] if tensor in self._runs else super().weight(tensor)

    def places(self) -> Iterator[Place]:
        """Yield where each stepped parameter's piece lies."""
        groups = {piece: group for group in self.optimizer.param_groups for piece in group["params"]}
        names = self.names.of_parameters()
        for bucket, slot in self._pieces.slots():
            piece = self._pieces.of[slot.parameter]
            if piece in groups:
                yield Place(
                    name=names[slot.parameter],
                    group=groups[piece],
                    tensor=piece,
                    shape=self.shape_of(slot.parameter),
                    start=bucket.own_start(slot) if bucket.is_divided else None,
                    split=self.split_of(slot.parameter),
                    writes=self.writes(slot.parameter),
                )

    def updated(self) -> None:
        """Bring all weights up to date with their masters."""
        self._sharded_model.updated()
