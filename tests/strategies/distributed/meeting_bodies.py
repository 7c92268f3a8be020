"""Lets ranks of a pool meet each other again, as processes with places of the test's choice."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import TCPStore

from hardware_db.errors import DsplanError
from strategies.distributed import rendezvous
from strategies.distributed.launcher_env import Address, ProcessVariables
from strategies.distributed.rendezvous import meet
from strategies.variables import RENDEZVOUS_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Whom one process of the pool takes itself for."""

    rank: int
    world_size: int
    device: str = "cpu"
    local_rank: int = 0
    late_seconds: float = 0.0
    meets_again: bool = False
    ends: bool = False


def play(roles: Sequence[Role | None], port: int, seconds: float | None) -> tuple[str, float]:
    """Meet in this process's role; what came of it ("met" or the refusal) and the seconds it took. Without `seconds`
    the usual patience holds."""
    role = roles[dist.get_rank()]
    if role is None:
        return "absent", 0.0
    os.environ[RENDEZVOUS_SECONDS] = "" if seconds is None else str(seconds)
    time.sleep(role.late_seconds)
    variables = ProcessVariables(
        source="the test",
        rank=role.rank,
        world_size=role.world_size,
        local_rank=role.local_rank,
        local_world_size=role.world_size,
        meeting_point=Address(host="127.0.0.1", port=port),
    )
    begun = time.monotonic()
    try:
        store = meet(variables, role.device)
        if role.ends:
            rendezvous.notify_end()
        if role.meets_again:
            store = meet(variables, role.device)
        store.set(f"shared-{role.rank}", "here")
        for rank in range(0 if role.ends else role.world_size):
            assert store.get(f"shared-{rank}") == b"here"
        store.add("read", 1)
        while role.rank == 0 and not role.ends and store.add("read", 0) < role.world_size:  # its store ends with it
            time.sleep(0.01)
    except DsplanError as refusal:
        return str(refusal), time.monotonic() - begun
    return "met", time.monotonic() - begun


def play_under_an_agent(roles: Sequence[Role | None], port: int, started: int) -> tuple[str, float]:
    """`play` with torch elastic's variables, as if its agent had started `started` ranks, and half a second's patience
    for ranks that may not be there. The process without a role is the agent, whose store they meet in."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "ROLE_WORLD_SIZE": str(started)}
    patience, rendezvous.FIRST_SECONDS = rendezvous.FIRST_SECONDS, 0.5
    os.environ.update(variables)
    try:
        is_agent = roles[dist.get_rank()] is None
        played = ("agent", 0.0) if is_agent else play(roles, port, None)
        store = TCPStore("127.0.0.1", port, is_master=is_agent, wait_for_workers=False)
        store.add("over", 1)
        while is_agent and store.add("over", 0) < len(roles):
            time.sleep(0.01)
        return played
    finally:
        rendezvous.FIRST_SECONDS = patience
        for name in variables:
            del os.environ[name]
