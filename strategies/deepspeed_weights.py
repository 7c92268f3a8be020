"""A model's weights, whole, under DeepSpeed: to read, to generate with, or to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves


def state_tensors(model: nn.Module, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """A rank's parameters, gradients and optimizer states, by the attributes of DeepSpeed's two ZeRO optimizers."""
    parameters: list[Any] = list(model.parameters())

    def held(*names: str) -> list[torch.Tensor]:
        found = tree_leaves([getattr(optimizer, name, None) for name in names])
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    own = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = tree_leaves([*optimizer.state.values()])
    return {
        "parameters": [*parameters, *model.buffers(), *shards, *held("bit16_groups_flat")],
        "gradients": [*own, *held("averaged_gradients", "grad_partitions_flat_buffer")],
        "optimizer": [
            *held("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
            *(leaf for leaf in states if isinstance(leaf, torch.Tensor)),
        ],
    }


@contextmanager
def whole(model: nn.Module, stage: int, *, keeps_changes: bool) -> Iterator[None]:
    """All weights whole inside; `keeps_changes` takes over what rank 0 wrote to them, in the fp32 masters as well."""
    zero: Any = import_module("deepspeed").zero
    parameters: list[Any] = list(model.parameters())
    changed: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
    with (
        _staying(parameters if stage == 3 else []),
        zero.GatheredParameters(parameters, modifier_rank=0 if keeps_changes else None, enabled=stage == 3),
    ):
        before = {parameter: parameter.detach().clone() for parameter in parameters if keeps_changes}
        yield
        for parameter, old in before.items():
            dist.broadcast(parameter.data, 0)
            if not torch.equal(parameter.data, old):
                changed[parameter] = (old, parameter.detach().clone())
    for parameter, (old, new) in changed.items():
        _change_master(parameter, old, new)


@contextmanager
def _staying(parameters: list[Any]) -> Iterator[None]:
    """Stage 3 frees weights after a module has run; those that persist stay."""
    before = [parameter.ds_persist for parameter in parameters]
    for parameter in parameters:
        parameter.ds_persist = True
    try:
        yield
    finally:
        for parameter, persists in zip(parameters, before, strict=True):
            parameter.ds_persist = persists


def _change_master(parameter: nn.Parameter, old: torch.Tensor, new: torch.Tensor) -> None:
    """Elements that changed in the weights change in their fp32 master; the others keep their bits."""
    utilities: Any = import_module("deepspeed.utils")
    master = utilities.safe_get_full_fp32_param(parameter)
    if master is not None:
        utilities.safe_set_full_fp32_param(parameter, torch.where(new == old, master, new.to(master.dtype)))
