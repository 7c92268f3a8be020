"""Strategies in a trace: rank 0 of any world size, alone in one process, over torch's `fake` process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES
from strategies.tracing.step.refusal import TraceFailed
from strategies.tracing.step.storages import Storages

# The dtypes that a plan's precision means for weights, for computing, and for autocast: docs/explanation/strategies.md,
# "What a precision means".

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


def weight_dtype(configuration: Configuration) -> torch.dtype | None:
    """What the model's weights are cast to before training; None leaves them as they are."""
    casts = configuration.precision == "bf16-pure" or configuration.zero_stage > 0
    return _SIXTEEN_BITS.get(configuration.precision) if casts else None


def autocast_dtype(configuration: Configuration) -> torch.dtype | None:
    """Return the dtype that autocast computes in, or None without autocast."""
    casts = configuration.precision in ("bf16", "fp16") and configuration.strategy in ("single", "ddp")
    return _SIXTEEN_BITS[configuration.precision] if casts else None


def all_gather_dtype(configuration: Configuration) -> torch.dtype | None:
    """Return the dtype of FSDP's all-gather and compute (shards and reduction are fp32), or None if nothing changes."""
    casts = configuration.precision in ("bf16", "fp16") and configuration.strategy in FSDP_STRATEGIES
    return _SIXTEEN_BITS[configuration.precision] if casts else None


_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


@contextlib.contextmanager
def ranks(configuration: Configuration) -> Iterator[DeviceMesh]:
    """A mesh of the plan's data-parallel ranks, of which this process is rank 0 and the others do not exist.

    Raises:
        TraceFailed: this process belongs to a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise TraceFailed("", "", "this process is a rank of a running job")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=configuration.world_size)
    try:
        if configuration.strategy == "hsdp":
            degrees = (configuration.dp_replicate, configuration.dp_shard)
            yield init_device_mesh("cpu", degrees, mesh_dim_names=("dp_replicate", "dp_shard"))
        else:
            yield init_device_mesh("cpu", (configuration.dp_shard,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()


def shard(module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, configuration: Configuration) -> None:
    """FSDP2 over the blocks and the root, as `strategies.backends.fsdp` wraps them.

    Raises:
        TraceFailed: FSDP2 does not take the module; a parameter that is a scalar, say.
    """
    dtype = all_gather_dtype(configuration)
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    reshard = configuration.strategy != "fsdp-grad-op"
    try:
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    except ValueError as problem:
        raise TraceFailed("fully_shard", type(module).__name__, str(problem)) from problem


def synchronize(module: nn.Module, configuration: Configuration, *, reduces: bool) -> None:
    """Whether the next backward reduces gradients over the ranks."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduces or configuration.sync_each_micro_batch)


def reduction_buckets(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The buckets that DistributedDataParallel keeps with its defaults: a second copy of the gradients.

    torch's reducer, which is C++, does not run on fake tensors; its own function says how it cuts the buckets.
    """
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    collectives: Any = dist
    buckets, _ = collectives._compute_bucket_assignment_by_size(trained, [_FIRST_BUCKET_BYTES, _BUCKET_BYTES])
    return [
        torch.empty(sum(trained[index].numel() for index in bucket), dtype=trained[bucket[0]].dtype)
        for bucket in buckets
    ]


@contextlib.contextmanager
def sharding_counted(storages: Storages, watch: Callable[[Sequence[nn.Parameter]], None]) -> Iterator[None]:
    """What FSDP2 gathers and reduces counts as buffers, the gradients it leaves as gradients.

    `watch` is called with the whole parameters, which FSDP2 makes when it first gathers them.
    """
    group, parameter = _internals()
    originals = {name: getattr(group, name) for name in ("unshard", "wait_for_unshard", "post_backward")}
    initialize = parameter.init_unsharded_param

    def counted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with storages.making("buffers"):
                result = originals[name](self, *args, **kwargs)
            if name == "post_backward":
                storages.label(_gradients(self), "gradients")
            return result

        return method

    def init_unsharded_param(self: Any) -> None:
        existed = hasattr(self, "_unsharded_param")
        initialize(self)
        if not existed:
            watch([self._unsharded_param])

    for name in originals:
        setattr(group, name, counted(name))
    parameter.init_unsharded_param = init_unsharded_param
    try:
        with _shapes_apart():
            yield
    finally:
        parameter.init_unsharded_param = initialize
        for name, original in originals.items():
            setattr(group, name, original)


@contextlib.contextmanager
def _shapes_apart() -> Iterator[None]:
    """DTensor works out shapes by running an operation on whole fake tensors, which a real step never has; it takes
    them from the fake mode that is on, where nothing tells them from the step's own."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def apart(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return original(self, schema)

    propagator._propagate_tensor_meta_non_cached = apart
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original


def _internals() -> tuple[Any, Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup, FSDPParam


def _gradients(group: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        found += [
            parameter.sharded_param.grad,
            parameter.unsharded_accumulated_grad,
            whole.grad if whole is not None else None,
        ]
    return found
