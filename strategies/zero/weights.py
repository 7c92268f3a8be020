"""Weights: from the script's parameters to buckets on the device, and back to whole weights after each step.

`load` moves a bucket's weights to the device, rank 0's for all, and sets up the copy that the optimizer changes. The
device never holds more than one bucket twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from strategies.zero.partition import Bucket, Owners
from strategies.zero.settings import ZeroSettings
from strategies.zero.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where states live: weights and gradients on `device`, masters and optimizer states on `host` where they are
    offloaded; `wire` connects the ranks; `owners` says whose the parameters are that an optimizer must step whole."""

    device: torch.device
    wire: Wire
    settings: ZeroSettings
    owners: Owners = field(default_factory=dict)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer's states leave the device; on a CPU they are on the host anyway."""
        return self.settings.offload != "none" and self.device.type != "cpu"


def load(bucket: Bucket, home: Home, *, trains: bool, keeps: bool) -> None:
    """Fill a bucket from its parameters: `whole` stays where `keeps`, `master` is made where `trains`."""
    layout, dtype = bucket.layout, bucket.dtype
    original = _together(bucket, home)
    whole = original if original.dtype == dtype else original.to(dtype)
    bucket.whole = whole
    bucket.place(whole)
    run = layout.own_slice
    bucket.part = whole[run] if keeps else whole[run].clone()
    bucket.trains = trains
    if trains:
        bucket.master = bucket.part
        wide = home.settings.master
        if wide is not None and dtype in (torch.float16, torch.bfloat16):
            bucket.master = original[run].to(wide, copy=True)
        if home.offloads:
            bucket.master = bucket.master.to("cpu").pin_memory()
            if home.settings.offload == "all" and not keeps:
                bucket.part = bucket.master if wide is None else bucket.part.to("cpu").pin_memory()
        elif not keeps:
            bucket.part = bucket.master  # gathering casts it: sharded weights are kept once, as FSDP2 keeps them


def _together(bucket: Bucket, home: Home) -> torch.Tensor:
    """Rank 0's weights of a bucket side by side on the device, in the parameters' own dtype, [layout.padded]."""
    parameters = [slot.parameter.detach() for slot in bucket.slots]
    dtype = parameters[0].dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)
    flat = torch.zeros(bucket.layout.padded, dtype=dtype, device=home.device)
    for slot, parameter in zip(bucket.slots, parameters, strict=True):
        flat[slot.start : slot.stop].view(parameter.shape).copy_(parameter)
    if home.wire.ranks.world_size > 1:
        dist.broadcast(flat, 0)
    return flat


def settle_rest(model: nn.Module, bucketed: set[nn.Parameter], home: Home) -> None:
    """Move what is in no bucket to the device, rank 0's for all: parameters that are not trained, and buffers.

    Both take the dtype that weights compute in; buffers that checkpoints leave out keep theirs, since they are derived
    constants (rotary frequencies) that 16 bits would spoil.
    """
    for parameter in model.parameters():
        if parameter not in bucketed:
            parameter.data = _settled(parameter.data, home.settings.weights(parameter.dtype), home)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            fixed = name in module._non_persistent_buffers_set
            buffer.data = _settled(buffer, buffer.dtype if fixed else home.settings.weights(buffer.dtype), home)


def _settled(tensor: torch.Tensor, dtype: torch.dtype, home: Home) -> torch.Tensor:
    here = tensor.detach().to(device=home.device, dtype=dtype)
    if home.wire.ranks.world_size > 1:
        here = here.contiguous()
        dist.broadcast(here, 0)
    return here


def publish(buckets: Iterable[Bucket], wire: Wire) -> None:
    """After a step: every rank's new weights to every rank. All gathers are begun before the first is waited for."""
    with torch.profiler.record_function("dsplan::gather"):
        arrivals = []
        for bucket in buckets:
            refresh(bucket)
            arrivals.append(wire.gather(bucket.whole, bucket.part, bucket.layout))
        for arrival in arrivals:
            arrival.wait()


def refresh(bucket: Bucket) -> None:
    """This rank's weights from the master copy that the optimizer has changed."""
    if bucket.master is not bucket.part:
        bucket.part.copy_(bucket.master, non_blocking=True)


def take_over(bucket: Bucket, whole: torch.Tensor, wire: Wire) -> None:
    """Make what was written to whole weights, on rank 0, this rank's part and master."""
    if wire.ranks.world_size > 1:
        dist.broadcast(whole, 0)
    first, last = bucket.layout.own
    bucket.part[: last - first].copy_(whole[first:last])
    if bucket.trains and bucket.master is not bucket.part:
        bucket.master.copy_(bucket.part)
