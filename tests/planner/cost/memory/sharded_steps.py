"""True peaks of torch's strategies as rank 0 of a fake process group of any size.

The module's weights dwarf its activations (one token), so that what a strategy holds stands alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.types.plan import Configuration
from strategies.modules.precision import cast_model, sharding_policy
from strategies.tracing.storage_tracker import StorageTracker

OptimizerOf = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a stack of blocks between a table of `rows` and a head; odd ones leave remainders in every sharding."""

    rows: int = 4001
    width: int = 253
    inner: int = 1021
    blocks: int = 4
    tied: bool = False


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(sizes.width))
        self.up = nn.Linear(sizes.width, sizes.inner)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.down(self.up(x * self.scale))
        return changed


class Stack(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.rows, sizes.width)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.blocks)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.rows, bias=False)
        if sizes.tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().sum()  # type: ignore[no-any-return]


def true_peaks(sizes: Sizes, configuration: Configuration, optimizer: OptimizerOf) -> dict[str, int]:
    """Bytes at the peak of forward, backward and step, all weights and states included, in the second step."""
    with _group(configuration) as mesh:
        model = cast_model(Stack(sizes), configuration.precision)
        model = _wrapped(model, configuration, mesh)
        stepper = optimizer(model.parameters())
        tokens = torch.zeros(1, dtype=torch.long)
        # The first step makes optimizer states, and DTensor works out its shardings on fake tensors.
        _step(model, stepper, tokens, (configuration, StorageTracker()))
        states = [value for state in stepper.state.values() for value in state.values()]
        with StorageTracker([tokens, *_local(model.parameters()), *_local(states)]) as tracker:
            return _step(model, stepper, tokens, (configuration, tracker))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, job: tuple[Configuration, StorageTracker]
) -> dict[str, int]:
    configuration, tracker = job
    peaks = {"forward": 0, "backward": 0}
    for micro in range(configuration.gradient_accumulation_steps):
        last = micro == configuration.gradient_accumulation_steps - 1
        tracker.restart_peak()
        with _synchronisation(model, reduces=last or configuration.sync_each_micro_batch):
            loss = model(tokens)
        peaks["forward"] = max(peaks["forward"], tracker.peak_bytes)
        tracker.restart_peak()
        loss.backward()
        del loss
        peaks["backward"] = max(peaks["backward"], tracker.peak_bytes)
    tracker.restart_peak()
    optimizer.step()
    peaks["step"] = tracker.peak_bytes
    model.zero_grad(set_to_none=True)
    return peaks


def _synchronisation(model: nn.Module, *, reduces: bool) -> contextlib.AbstractContextManager[object]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduces)
    elif isinstance(model, DistributedDataParallel) and not reduces:
        return model.no_sync()
    return contextlib.nullcontext()


def _wrapped(model: nn.Module, configuration: Configuration, mesh: DeviceMesh | None) -> nn.Module:
    if configuration.strategy == "ddp":
        return DistributedDataParallel(model)
    if configuration.strategy == "single":
        return model
    policy = OffloadPolicy() if configuration.offload == "none" else CPUOffloadPolicy(pin_memory=False)
    ways: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": sharding_policy(configuration.precision),
        "offload_policy": policy,
    }
    assert isinstance(model, Stack)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=configuration.strategy != "fsdp-grad-op", **ways)
    fully_shard(model, **ways)
    return model


def _local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


@contextlib.contextmanager
def _group(configuration: Configuration) -> Iterator[DeviceMesh | None]:
    if configuration.strategy == "ddp":  # its reducer wants what a real group returns; one rank holds what many hold
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=configuration.world_size)
    try:
        degrees = {"dp_replicate": configuration.dp_replicate, "dp_shard": configuration.dp_shard}
        if configuration.strategy in ("single", "ddp"):
            yield None
        elif configuration.dp_replicate > 1:
            yield init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        else:
            yield init_device_mesh("cpu", (configuration.dp_shard,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()
