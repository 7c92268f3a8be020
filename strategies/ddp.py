"""Replicated data parallelism: torch's DistributedDataParallel with its defaults."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from strategies.compression import gradient_travel
from strategies.ddp_compression import compress
from strategies.environment import ensure_group
from strategies.precision import autocast
from strategies.protocols import TrainingParts
from strategies.torch_engine import TorchEngine, TorchStrategy
from strategies.zero.partition import Ranks
from strategies.zero.wire import wire_for


class ReplicatedDataParallel(TorchStrategy):
    """Every rank holds the whole model; gradients are averaged in buckets while backward runs."""

    def engine(self, parts: TrainingParts) -> TorchEngine:
        travel = gradient_travel(parts)
        engine = super().engine(parts)
        ranks = Ranks(rank=self.environment.rank, world_size=self.environment.world_size)
        wire = wire_for(ranks, self.environment.device)
        replica = cast("DistributedDataParallel", engine.wrapped)
        compress(replica, travel, wire, lambda: engine.loss_scale)
        return engine

    def wrap(self, model: nn.Module) -> nn.Module:
        ensure_group(self.environment)
        device = self.environment.device
        return DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)

    def synchronization(self, module: nn.Module, *, reduces: bool) -> AbstractContextManager[object]:
        # DDP decides in forward whether the following backward reduces, so only forward needs to be inside.
        wrapper = cast("DistributedDataParallel", module)
        return nullcontext() if reduces else wrapper.no_sync()

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.configuration.precision, self.environment.device)
