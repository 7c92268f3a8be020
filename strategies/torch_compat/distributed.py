"""Stores, process groups, meshes, DDP, gloo and elastic rendezvous."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this rank."""
    world: Any = dist.distributed_c10d
    return list(world._world.pg_map)


_MESH_CACHES = (
    "device_mesh:_mesh_resources.child_to_root_mapping.clear",
    "device_mesh:_mesh_resources.root_to_flatten_mapping.clear",
    "tensor.debug:_clear_sharding_prop_cache",
    "tensor._api:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
    "tensor._redistribute:clear_redistribute_planner_cache",
    "tensor._redistribute:_gen_transform_infos.cache_clear",
    "tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
"""How DTensor and meshes forget meshes, whose groups live as long as they do; each where this torch has it."""


def forget_meshes() -> None:
    """Have DTensor forget the meshes that it has worked with, if it was used at all."""
    if "torch.distributed.tensor._redistribute" not in sys.modules:
        return
    for path in _MESH_CACHES:
        module, _, names = path.partition(":")
        clear: Any = import_module(f"torch.distributed.{module}")
        for name in names.split("."):
            clear = getattr(clear, name, None)
        if clear is not None:
            clear()


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh as one dimension; asked again for the same name it is the same."""
    return mesh._flatten(name)


def fake_store() -> Store:
    """Return a store for torch's `fake` process group, whose other ranks do not exist."""
    store: Store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    return store


def functional_collectives() -> Any:
    """Return the collectives that return new tensors, which autograd and tracing see."""
    return torch.ops._c10d_functional


def ignore_in_ddp(model: nn.Module, names: Collection[str]) -> None:
    """Have DDP leave parameters and buffers alone: ranks have others."""
    kind: Any = DistributedDataParallel
    kind._set_params_and_buffers_to_ignore_for_model(model, list(names))


def ddp_buckets(tensors: Sequence[torch.Tensor], limits: Sequence[int]) -> list[list[int]]:
    """Return the indices of the tensors in each bucket, as DDP cuts buckets of these most bytes."""
    collectives: Any = dist
    buckets: list[list[int]] = collectives._compute_bucket_assignment_by_size(tensors, limits)[0]
    return buckets


def nccl_options(timeout: timedelta) -> Any:
    """Return options of an NCCL group."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def present_nodes(handler: Any) -> int:
    """Return how many nodes of a rendezvous's round are heard of."""
    return len(handler._state_holder.state.participants)


def leave_rendezvous(handler: Any, deadline: float) -> None:
    """Give this node's place up before `deadline` (`time.monotonic()`), instead of when its heartbeat is missed."""
    exiting = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")._RendezvousExitOp
    handler._stop_heartbeats()
    handler._op_executor.run(exiting(), deadline)
