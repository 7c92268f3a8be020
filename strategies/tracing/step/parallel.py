"""Strategies in a trace: rank 0 of any world size, alone in one process, over torch's `fake` process group."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from planner.types.plan import Configuration
from planner.vocabulary import FSDP_STRATEGIES
from strategies.torch_compat.distributed import ddp_buckets, fake_store, flatten
from strategies.torch_compat.sharding import fsdp_watched, meshes_joined_without_modes, shapes_without_modes
from strategies.tracing.step.refusal import TraceFailed
from strategies.tracing.step.storages import Storages
from strategies.tracing.storage_tracker import plain_parts

# The dtypes that a plan's precision means for weights, for computing, and for autocast: docs/explanation/strategies.md,

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


def weight_dtype(configuration: Configuration) -> torch.dtype | None:
    """Return what the model's weights are cast to before training; None leaves them as they are."""
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


_SHARDS = "dp_shard_cp"
_FIRST_BUCKET_BYTES = 1 << 20
_BUCKET_BYTES = 25 << 20


@contextlib.contextmanager
def ranks(configuration: Configuration) -> Iterator[DeviceMesh]:
    """Make a mesh of the plan's data-parallel ranks, of which this process is rank 0 and the others do not exist.

    Raises:
        TraceFailed: this process belongs to a real process group.
    """
    if dist.is_initialized():
        raise TraceFailed("", "", "this process is a rank of a running job")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=configuration.world_size)
    try:
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        degrees = tuple(getattr(configuration, name) for name in names)
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=names)
        # Before tensors are fake, of which torch cannot say where a rank is; asked again it gives the same mesh.
        flatten(mesh["dp_shard", "cp"], _SHARDS)
        yield mesh
    finally:
        dist.destroy_process_group()


def expert_ranks(configuration: Configuration) -> DeviceMesh:
    """Return the mesh of a job whose experts are spread: `ep`, and `alone` of one rank that splits no batch."""
    others = configuration.world_size // configuration.ep
    return init_device_mesh("cpu", (others, configuration.ep, 1), mesh_dim_names=("efsdp", "ep", "alone"))


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    configuration: Configuration,
    experts: DeviceMesh | None = None,
    *,
    root_stays: bool = True,
) -> None:
    """Apply FSDP2 to the blocks and the root, as `strategies.backends.fsdp` wraps them.

    The root's weights are whole from forward to backward where `root_stays`, else as long as a block's.

    Experts that are spread over ranks are units of their own, shared by those ranks that have the same ones, as
    transformers has it.

    Raises:
        TraceFailed: FSDP2 does not take the module; a parameter that is a scalar, say.
    """
    dtype = all_gather_dtype(configuration)
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    offload = OffloadPolicy() if configuration.offload == "none" else CPUOffloadPolicy(pin_memory=False)
    wrap = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    reshard = configuration.strategy != "fsdp-grad-op"
    # torchtitan and accelerate share the states among cp's ranks too.
    sharding = flatten(mesh["dp_shard", "cp"], _SHARDS)
    if configuration.dp_replicate > 1:
        with warnings.catch_warnings():  # torch 2.11 on has no other way to join it to a dimension of the same root
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            sharding = mesh["dp_replicate", _SHARDS]
    try:
        with meshes_joined_without_modes():
            for block in blocks:
                if experts is not None:
                    for inner in (part for part in block.modules() if getattr(part, "_is_expert_parallel", False)):
                        wrap(inner, mesh=experts["efsdp"], reshard_after_forward=reshard)
                wrap(block, mesh=sharding, reshard_after_forward=reshard)
            wrap(module, mesh=sharding, **({} if root_stays else {"reshard_after_forward": reshard}))
    except ValueError as problem:
        raise TraceFailed("fully_shard", type(module).__name__, str(problem)) from problem


def synchronize(module: nn.Module, configuration: Configuration, *, reduces: bool) -> None:
    """Return whether the next backward reduces gradients over the ranks."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduces or configuration.sync_each_micro_batch)


def reduction_buckets(parameters: Iterable[nn.Parameter], *, first: bool = False) -> list[int]:
    """Return the bytes of the buckets that DistributedDataParallel keeps by default: a second copy of the gradients.

    `parameters` are in the order in which their gradients are made. In the `first` step DDP learns this order, and its
    buckets have all parameters of a dtype each (`torch/nn/parallel/distributed.py`: `sys.maxsize` unless unused ones
    are looked for).

    torch's reducer, which is C++, does not run on fake tensors; its own function says how it cuts the buckets.
    """
    # What tensor parallelism splits is a DTensor, of which DDP sees the local part.
    trained: list[torch.Tensor] = []
    for weight in parameters:
        trained += plain_parts(weight) if weight.requires_grad else ()
    limits = [sys.maxsize] if first else [_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    return [sum(trained[index].nbytes for index in bucket) for bucket in ddp_buckets(trained, limits)]


@contextlib.contextmanager
def count_sharding(storages: Storages, watch: Callable[[Sequence[nn.Parameter]], None]) -> Iterator[None]:
    """Count what FSDP2 gathers and reduces as buffers, the gradients it leaves as gradients.

    `watch` is called with the whole parameters, which FSDP2 makes when it first gathers them.
    """
    with (
        fsdp_watched(
            lambda: storages.making("buffers"),
            lambda: storages.making("host"),
            lambda weight: watch([weight]),
            lambda gradients: storages.label(gradients, "gradients"),
        ),
        shapes_without_modes(),
    ):
        yield
