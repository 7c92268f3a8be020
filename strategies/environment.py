"""Environment: which rank this process is, how many there are, and which device is its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from strategies.errors import CannotRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """This process among its peers; variables and meanings are those of torchrun."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)


def join() -> Environment:
    """Read who this process is, join the process group where there are several ranks, and take the local GPU.

    Without torchrun's variables this process is alone. A group that the script has joined already is used as it is.

    Raises:
        CannotRun: torchrun's variables are not numbers, or there are fewer GPUs than local ranks.
    """
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    local_rank = _number("LOCAL_RANK", rank)
    environment = Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_number("LOCAL_WORLD_SIZE", world_size),
        device=_device(local_rank),
    )
    if world_size > 1:
        ensure_group(environment)
    return environment


def ensure_group(environment: Environment) -> None:
    """Join the default process group unless this process is in it; a lone process makes a group of its own."""
    if dist.is_initialized():
        return
    # Objects and metadata of checkpoints travel over gloo also where tensors travel over NCCL.
    backend = "cpu:gloo,cuda:nccl" if environment.device.type == "cuda" else "gloo"
    if environment.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise CannotRun(
            f"local rank {local_rank} has no GPU: this machine shows {torch.cuda.device_count()};"
            f" start at most that many ranks per node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        raise CannotRun(f"the environment variable {variable} is {text!r}; it must be a whole number")
    return int(text) if text else default
