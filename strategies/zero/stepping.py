"""Stepping: the optimizer changes the masters, and the weights follow, in groups of buckets.

An optimizer steps the pieces that have gradients and passes over the others, so that giving only one group's pieces
their gradients steps that group. While one is stepped on the host, the weights of the last are on their way to the
device and to the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from planner.zero_buckets import NATIVE_STEP_RUNS
from strategies.zero.nvme import Disk
from strategies.zero.offload import fused_on_host
from strategies.zero.optimizer import Pieces
from strategies.zero.partition import Bucket, Place


class Renewing(Protocol):
    """Who brings weights up to date."""

    def renew(self, bucket: Bucket) -> None:
        """The master of a bucket has changed: begin to bring its weights up to date on every rank."""

    def renewed(self) -> None:
        """All masters have changed: wait for the weights."""


class Stepper:
    """One step of the optimizer; `disk` has the states of the buckets that are there."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Pieces, weights: Renewing, disk: Disk | None) -> None:
        self._optimizer, self._pieces, self._weights, self._disk = optimizer, pieces, weights, disk

    def step(self, used: set[nn.Parameter], factor: float) -> None:
        """Multiply the gradients of the parameters that any rank used by `factor`, and step with them."""
        before = [_options(group) for group in self._optimizer.param_groups]
        for group in self._groups():
            # A count of steps that a group of parameters keeps goes up once in a step, however many parts that has.
            for options, kept in zip(self._optimizer.param_groups, before, strict=True):
                options.update(kept)
            self._advance(group, used, factor)
            for bucket in group:
                self._weights.renew(bucket)
        self._weights.renewed()

    def _groups(self) -> Iterator[Sequence[Bucket]]:
        """The device's buckets first, since it steps them while the host goes on with its own."""
        at = {place: [bucket for bucket in self._pieces.buckets if bucket.states_at is place] for place in Place}
        yield from self._runs(at[Place.DEVICE])
        yield from ([bucket] for bucket in at[Place.HOST])
        if self._disk is not None:
            yield from ([bucket] for bucket in self._disk.visited(at[Place.DISK], self._pieces, self._optimizer))

    def _runs(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """All of the device's buckets at once, but one run of them after the other where their gradients must take the
        masters' wider dtype first: a rank has room for few of them in that.

        Optimizers of whole tensors may look at all of them together, and keep them together.
        """
        widens = any(one.gradient is not None and one.gradient.dtype != one.master.dtype for one in buckets)
        if not widens or not all(bucket.is_divided for bucket in buckets):
            yield from [buckets] if buckets else []
            return
        limit, run = sum(bucket.master.numel() for bucket in buckets) / NATIVE_STEP_RUNS, list[Bucket]()
        for bucket in buckets:
            if run and sum(one.master.numel() for one in [*run, bucket]) > limit:
                yield run
                run = []
            run.append(bucket)
        yield run

    def _advance(self, group: Sequence[Bucket], used: set[nn.Parameter], factor: float) -> None:
        is_away = group[0].states_at is not Place.DEVICE
        with torch.profiler.record_function("dsplan::step_on_host" if is_away else "dsplan::step"):
            self._pieces.attach(group, used, factor)
            with fused_on_host(self._optimizer) if is_away else nullcontext():
                self._optimizer.step()
            self._pieces.detach(group)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
