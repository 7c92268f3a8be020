"""Weights: from the script's parameters to buckets on the device, and back to whole weights after each step.

`load` moves a bucket's weights to the device, rank 0's for all, and sets up the copy that the optimizer changes. The
device never holds more than one bucket twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from strategies.backends.zero.collectives import Arrival, Collectives
from strategies.backends.zero.flat_shard import Bucket, Owners, Place
from strategies.backends.zero.offload import Offload
from strategies.backends.zero.settings import ZeroSettings
from strategies.parallel.empty import is_stand_in
from strategies.parallel.whole import Kind
from strategies.torch_compat.tensors import transient_buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingContext:
    """Devices of states and groups of ranks."""

    device: torch.device
    """Where weights and gradients are."""
    collectives: Collectives
    """Between the ranks that share one copy of the states."""
    settings: ZeroSettings
    offload: Offload
    """Where masters and optimizer states are, unless on the device."""
    owners: Owners = field(default_factory=dict)
    """Whose the parameters are that an optimizer must step whole."""
    kinds: Mapping[nn.Parameter, Kind] = field(default_factory=dict)
    """Which parameters may lie side by side: those of one kind."""
    experts: Collectives | None = None
    """Between the ranks that share experts."""
    replicas: Collectives | None = None
    """Between the ranks that have the same shards, one of each copy of the states; None where there is one copy."""
    everyone: Collectives | None = None
    """Between the ranks of all copies; None where there is one."""
    all_experts: Collectives | None = None
    """The same of experts."""

    def kind_of(self, parameter: nn.Parameter) -> Kind:
        """Return what a parameter has in common with those that it may share a bucket with."""
        return self.kinds.get(parameter, _PLAIN)

    def collectives_of(self, kind: Kind) -> Collectives:
        """Return those between the ranks that share the states of such parameters."""
        return self.experts if kind.is_expert and self.experts is not None else self.collectives

    def everyone_with(self, kind: Kind) -> Collectives:
        """Return those between all ranks that have such parameters, in whatever copy of the states."""
        every = self.all_experts if kind.is_expert else self.everyone
        return every or self.collectives_of(kind)


_PLAIN = Kind()


def load(bucket: Bucket, context: ShardingContext, *, trains: bool, keeps: bool) -> None:
    """Fill a bucket from its parameters: `whole` stays where `keeps`, `master` is made where `trains`."""
    layout, dtype = bucket.layout, bucket.dtype
    original = _together(bucket, context)
    whole = original if original.dtype == dtype else original.to(dtype)
    bucket.whole = whole
    bucket.place(whole)
    run = layout.own_slice
    bucket.part = whole[run] if keeps else whole[run].clone()
    bucket.trains = trains
    if not trains:
        context.offload.fix(bucket)
        return
    _add_master(bucket, context, original[run], keeps=keeps)


def awaken(bucket: Bucket, context: ShardingContext) -> None:
    """Let an optimizer change sharded weights that were fixed; what 16 bits left out of them is lost."""
    bucket.trains = True
    _add_master(bucket, context, bucket.part, keeps=False)


def _add_master(bucket: Bucket, context: ShardingContext, original: torch.Tensor, *, keeps: bool) -> None:
    bucket.states_at, bucket.master = context.offload.chosen(bucket), bucket.part
    wide = context.settings.master
    if wide is not None and bucket.dtype in (torch.float16, torch.bfloat16):
        bucket.master = original.to(wide, copy=True)
    if bucket.states_at is not Place.DEVICE:
        context.offload.move(bucket, keeps=keeps)
    elif not keeps:
        bucket.part = bucket.master  # the all-gather casts it: sharded weights are stored once, as FSDP2 stores them


def _together(bucket: Bucket, context: ShardingContext) -> torch.Tensor:
    """Return rank 0's weights of a bucket side by side on the device, in the parameters' own dtype, [layout.padded].

    Where weights are read from files, ranks have the same of all others already, and room is in their place, which
    takes no host memory before it is written.
    """
    parameters = [slot.parameter.detach() for slot in bucket.slots]
    is_read = any(map(is_stand_in, parameters))
    if is_read and all(map(is_stand_in, parameters)):
        room = torch.empty(bucket.layout.padded, dtype=bucket.dtype, device=context.device)
        room[bucket.layout.elements :].zero_()
        return room
    dtype = parameters[0].dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)
    flat = torch.zeros(bucket.layout.padded, dtype=dtype, device=context.device)
    for slot, parameter in zip(bucket.slots, parameters, strict=True):
        flat[slot.start : slot.stop].view(parameter.shape).copy_(parameter)
    return flat if is_read else context.everyone_with(bucket.kind).from_first(flat)


def settle_rest(model: nn.Module, bucketed: set[nn.Parameter], context: ShardingContext) -> None:
    """Move what is in no bucket to the device, rank 0's for all: parameters that are not trained, and buffers.

    Both take the dtype that weights compute in; buffers that checkpoints leave out keep theirs, since they are derived
    constants (rotary frequencies) that 16 bits would spoil.
    """
    for parameter in model.parameters():
        if parameter not in bucketed:
            ranks = context.everyone_with(context.kind_of(parameter))
            parameter.data = _settled(parameter.data, context.settings.weights(parameter.dtype), context, ranks)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            fixed = name in transient_buffers(module)
            dtype = buffer.dtype if fixed else context.settings.weights(buffer.dtype)
            buffer.data = _settled(buffer, dtype, context, context.everyone_with(_PLAIN))


def _settled(
    tensor: torch.Tensor, dtype: torch.dtype, context: ShardingContext, collectives: Collectives
) -> torch.Tensor:
    if is_stand_in(tensor):
        return torch.empty(tensor.shape, dtype=dtype, device=context.device)
    here = tensor.detach().to(device=context.device, dtype=dtype)
    return collectives.from_first(here.contiguous()) if collectives.ranks.world_size > 1 else here


class Publisher:
    """After a step: this rank's new weights from the masters, and those of `everywhere` to every rank.

    All gathers are begun before the first is waited for. Weights that come up from the host set out to the other ranks
    when the next bucket's are on their way up.
    """

    def __init__(self, context: ShardingContext, everywhere: Iterable[Bucket]) -> None:
        self._context, self._everywhere = context, set(everywhere)
        self._coming: deque[tuple[Bucket, Arrival]] = deque()
        self._sent: list[Arrival] = []

    def also(self, buckets: Iterable[Bucket]) -> None:
        """Take more of `everywhere`."""
        self._everywhere.update(buckets)

    def renew(self, bucket: Bucket) -> None:
        """Begin to bring a bucket's weights up to date, when its master has changed."""
        arrival = self._context.offload.renew(bucket) if bucket.master is not bucket.part else None
        if arrival is None:
            self._send(bucket)
            return
        self._coming.append((bucket, arrival))
        self._receive(all_but=1)

    def finish(self) -> None:
        """Wait for what is on its way, when all of them have."""
        self._receive(all_but=0)
        for arrival in self._sent:
            arrival.wait()
        self._sent.clear()

    def _receive(self, *, all_but: int) -> None:
        while len(self._coming) > all_but:
            bucket, arrival = self._coming.popleft()
            arrival.wait()
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if bucket in self._everywhere:
            with torch.profiler.record_function("dsplan::gather"):
                collectives = self._context.collectives_of(bucket.kind)
                self._sent.append(collectives.all_gather(bucket.whole, bucket.part, bucket.layout))


def take_over(bucket: Bucket, whole: torch.Tensor, context: ShardingContext) -> None:
    """Make what the first of the ranks that have whole weights wrote to them this rank's part and master."""
    context.everyone_with(bucket.kind).from_first(whole)
    first, last = bucket.layout.own
    bucket.part[: last - first].copy_(whole[first:last])
    if bucket.trains and bucket.master is not bucket.part:
        bucket.master.copy_(bucket.part)
