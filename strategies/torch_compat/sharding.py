"""FSDP2, DTensor and context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategies.torch_compat.dispatch import without_modes
from strategies.torch_compat.replacing import replaced

__all__ = ["compute_local_shape_and_global_offset"]


def hide_hooks_from_modes(unit: nn.Module) -> None:
    """Keep what a module's hooks around forward do, as FSDP's, from modes that watch what runs."""

    def hide(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with without_modes():
                return hook(*args, **kwargs)

        return call

    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for number, hook in hooks.items():
            hooks[number] = hide(hook)


@contextmanager
def fsdp_watched(
    inside: Callable[[], AbstractContextManager[object]],
    on_host: Callable[[], AbstractContextManager[object]],
    unsharded: Callable[[nn.Parameter], object],
    reduced: Callable[[Sequence[torch.Tensor | None]], object],
) -> Iterator[None]:
    """Watch FSDP2's work, on a CPU as it is on a GPU: what it offloads is copied there and back.

    Args:
        inside: the context in which it all-gathers, waits and reduces.
        on_host: the context in which it copies gradients to host memory, where its plan offloads.
        unsharded: called with each whole parameter, which FSDP2 makes when it first all-gathers it.
        reduced: called with the gradients, sharded and whole, that a backward pass of a unit has left on the device.
    """
    group: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group").FSDPParamGroup
    parameter: Any = import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam
    initialize, post_backward = parameter.init_unsharded_param, group.post_backward
    gather_inputs, to_sharded = parameter.all_gather_inputs.fget, parameter.to_sharded_dtensor

    def in_context(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with inside():
                return original(self, *args, **kwargs)

        return method

    def reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = in_context(post_backward)(self, *args, **kwargs)
        reduced([gradient for each in self.fsdp_params for gradient in _gradients_of(each)])
        return result

    def init_unsharded_param(self: Any) -> None:
        existed = hasattr(self, "_unsharded_param")
        initialize(self)
        if not existed:
            unsharded(self._unsharded_param)

    def all_gather_inputs(self: Any) -> Any:
        if not self.offload_to_cpu:
            return gather_inputs(self)
        at_home, self._sharded_param_data = self._sharded_param_data, self._sharded_param_data.clone()
        try:
            return gather_inputs(self)
        finally:
            self._sharded_param_data = at_home

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> Any:
        if not self.offload_to_cpu:
            return to_sharded(self, tensor)
        with on_host():
            return to_sharded(self, tensor.clone())

    methods = {"unshard": in_context(group.unshard), "wait_for_unshard": in_context(group.wait_for_unshard)}
    with (
        replaced(group, **methods, post_backward=reduce),
        replaced(
            parameter,
            init_unsharded_param=init_unsharded_param,
            all_gather_inputs=property(all_gather_inputs),
            to_sharded_dtensor=to_sharded_dtensor,
        ),
    ):
        yield


def _gradients_of(parameter: Any) -> list[torch.Tensor | None]:
    whole = getattr(parameter, "_unsharded_param", None)
    return [
        None if parameter.offload_to_cpu else parameter.sharded_param.grad,
        parameter.unsharded_accumulated_grad,
        whole.grad if whole is not None else None,
    ]


def meshes_joined_without_modes() -> AbstractContextManager[object]:
    """Let FSDP2 over a tensor-parallel model join two meshes, which looks for this rank in a tensor of rank numbers."""
    mesh: Any = DeviceMesh
    if not hasattr(mesh, "_concatenate"):
        return nullcontext()
    original = mesh._concatenate

    def concatenate(meshes: Any) -> Any:
        with without_modes():
            return original(meshes)

    return replaced(mesh, _concatenate=staticmethod(concatenate))


def shapes_without_modes() -> AbstractContextManager[object]:
    """Hide the whole fake tensors on which DTensor works out shapes, and which a real step never has, from modes."""
    propagator: Any = import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def propagate(self: Any, schema: Any) -> Any:
        with without_modes():
            return original(self, schema)

    return replaced(propagator, _propagate_tensor_meta_non_cached=propagate)


@contextmanager
def context_parallel_attention(mesh: DeviceMesh, length_dim: int) -> Iterator[None]:
    """Split attention over the ranks of a mesh, as `torch.distributed.tensor.experimental.context_parallel` does."""
    attention: Any = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    attention._enable_context_parallel_dispatcher_impl(seq_dim=length_dim, mesh=mesh)
    try:
        yield
    finally:
        attention._disable_context_parallel_dispatcher_impl()
