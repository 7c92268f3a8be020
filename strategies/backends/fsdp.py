"""Sharded data parallelism: torch's FSDP2 (`fully_shard`) over the repeated blocks and the root, with its defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from planner.types.plan import Configuration
from strategies.distributed.environment import ensure_group
from strategies.distributed.gathers import note_gathers
from strategies.engine.torch_engine import TorchEngine, TorchStrategy
from strategies.modules.compression import gradient_travel
from strategies.modules.precision import sharding_policy
from strategies.parallel.blocks import repeated_blocks
from strategies.parallel.empty import give_memory, has_stand_ins
from strategies.parallel.expert import is_mixture
from strategies.parallel.model import share_weights
from strategies.parallel.split import parts_of
from strategies.protocols import TrainingParts
from strategies.torch_compat.sharding import hide_hooks_from_modes


class FullShard(TorchStrategy):
    """Parameters, gradients and optimizer states sharded; blocks are all-gathered when needed and freed after use."""

    reshard_after_forward = True
    _reduce_dtype: torch.dtype | None = None

    def engine(self, parts: TrainingParts) -> TorchEngine:
        """Make the engine, whose gradients are reduced in the dtype that the script asks for."""
        self._reduce_dtype = gradient_travel(parts).dtype
        return super().engine(parts)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model in place: experts and blocks as units, and the root."""
        ensure_group(self.environment)
        if self.mesh.is_data_parallel and not has_stand_ins(model):
            share_weights(model, self.environment.device)
        shard = partial(
            fully_shard,
            mp_policy=sharding_policy(self.configuration.precision, self._reduce_dtype),
            offload_policy=self.offload_policy(),
        )
        mesh, device = self.mesh.shard_mesh, self.environment.device
        if parts_of(model).experts:
            for mixture in [module for module in model.modules() if is_mixture(module)]:
                with _letting_go(mixture, model, device):
                    shard(mixture, mesh=self.mesh.expert_shard_mesh, reshard_after_forward=self.reshard_after_forward)
                # Selective checkpointing counts operations, and a unit that is computed again does others: it is
                # sharded by then, or is not.
                hide_hooks_from_modes(mixture)
        for block in repeated_blocks(model):
            with _letting_go(block, model, device):
                shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        # The root keeps torch's default: it is needed first in backward, so it stays unsharded after forward.
        with _letting_go(model, model, device):
            shard(model, mesh=mesh)
        note_gathers([unit for unit in model.modules() if isinstance(unit, FSDPModule)], _is_sharded)
        return model

    def offload_policy(self) -> OffloadPolicy:
        """Shards and optimizer states live in host memory where the plan offloads `all`."""
        if self.configuration.offload == "none":
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.environment.device.type == "cuda")

    def synchronization(self, module: nn.Module, *, reduces: bool) -> AbstractContextManager[object]:
        """Set whether the next backward pass reduces."""
        cast("FSDPModule", module).set_requires_gradient_sync(reduces)
        return nullcontext()

    @property
    def reduces_each_micro_batch(self) -> bool:
        """True if the plan counts on gradients that are sharded in every micro-batch."""
        # A micro-batch that is not reduced leaves whole gradients on every rank: 4 bytes per parameter, however many
        # ranks there are. The plan says whether it counted on them.
        return self.configuration.sync_each_micro_batch

    @contextmanager
    def whole(self, module: nn.Module, *, keeps_changes: bool) -> Iterator[None]:
        """All weights whole inside; `keeps_changes` takes over what rank 0 wrote to them."""
        units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        for unit in units:
            unit.reshard()  # what a forward pass without a backward left unsharded
        shards = dict(module.named_parameters())
        for unit in units:
            # A forward pass inside must not free what is open.
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        before = {name: whole.detach().clone() for name, whole in module.named_parameters() if keeps_changes}
        try:
            yield
            for name, whole in module.named_parameters():
                if keeps_changes:
                    _take_over(cast("DTensor", shards[name]), whole.detach(), before.pop(name))
        finally:
            for unit in units:
                unit.reshard()
                # torch's default keeps the root's weights from forward to backward.
                unit.set_reshard_after_forward(self.reshard_after_forward and unit is not module, recurse=False)


class ShardGradOp(FullShard):
    """Gradients and optimizer states sharded; parameters stay unsharded from forward to the end of backward."""

    reshard_after_forward = False


class HybridShard(FullShard):
    """Groups of `dp_shard` ranks share one copy of the states; `dp_replicate` groups hold copies of each other."""


def _is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP would all-gather some of a module's parameters; those it has are no DTensors meanwhile."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _take_over(shard: DTensor, whole: torch.Tensor, before: torch.Tensor) -> None:
    """Write rank 0's changes of a whole parameter into its shards, which may be of a wider dtype."""
    here = shard.to_local().detach()  # in host memory where the plan offloads
    new, old = (
        distribute_tensor(tensor, shard.device_mesh, shard.placements).to_local().to(here.device)
        for tensor in (whole, before)
    )
    here.copy_(torch.where(new == old, here, new.to(here)))


@contextmanager
def _letting_go(unit: nn.Module, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Empty the whole parameters that sharding a unit replaces; those without memory have it on the device inside.

    `fully_shard` moved them to the device, and whoever held them before (an optimizer, its groups) would keep them
    there: the whole model on every device.
    """
    whole = [parameter for parameter in unit.parameters() if not isinstance(parameter, DTensor)]
    give_memory(whole, device)
    yield
    still_used = set(model.parameters())
    for parameter in whole:
        if parameter not in still_used:
            parameter.data = parameter.data.new_empty(0)


def fully_shard_arguments(configuration: Configuration) -> dict[str, Any]:
    """Return what a script of its own hands to `fully_shard` for the same precision, resharding and offload."""
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(configuration.precision)
    policy = MixedPrecisionPolicy() if narrow is None else MixedPrecisionPolicy(narrow, torch.float32)
    kwargs: dict[str, Any] = {"mp_policy": policy}
    if configuration.strategy == "fsdp-grad-op":
        # Left out otherwise: torch then reshards every block and keeps the root, which backward needs first.
        kwargs["reshard_after_forward"] = False
    if configuration.offload == "all":
        kwargs["offload_policy"] = CPUOffloadPolicy()
    return kwargs
