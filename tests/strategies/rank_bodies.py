"""Functions that the tests of the rank pool send to ranks."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def rank_and_sum(offset: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        print("last words")
        raise ValueError(f"rank {rank} meant to fail")
    dist.barrier()
    return "never"


def exit_process(status: int) -> None:
    os._exit(status)


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.05)


def environment_of(name: str) -> str | None:
    return os.environ.get(name)


def is_loaded(module: str) -> bool:
    return module in sys.modules


def wait_for_ever() -> None:
    time.sleep(3600)


def parent_and_modules() -> tuple[int, set[str]]:
    """The process that this rank came from, and what is imported here."""
    return os.getppid(), set(sys.modules)


def make_groups(count: int) -> int:
    """Return how many threads this rank has with so many more groups."""
    for _ in range(count):
        dist.new_group()
    return len(os.listdir("/proc/self/task"))
