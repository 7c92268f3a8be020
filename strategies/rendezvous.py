"""Rendezvous: all ranks find each other, and are checked against each other, before the first collective.

A collective among ranks that disagree hangs, or ends after torch's half hour with a message that names no cause. Here
every rank writes who it is into the store at rank 0, reads who the others are, and says in one line what is wrong: two
processes with one rank, a wrong world size, one GPU for two ranks, a rank that never came, an address nobody answers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from strategies.errors import CannotRun
from strategies.process_variables import Address, ProcessVariables

SECONDS = "DSPLAN_RENDEZVOUS_SECONDS"
"""Environment variable: how long ranks wait for each other."""
DEFAULT_SECONDS = 600.0
_REMARK_SECONDS = 20.0
_LOOK_SECONDS = 0.02
_READ_SECONDS = 2.0
_TRY_SECONDS = 3.0
_AGREED = "agreed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """What a rank says of itself."""

    rank: int
    world_size: int
    host: str
    process_id: int
    local_rank: int
    device: str

    @property
    def where(self) -> str:
        return f"process {self.process_id} on {self.host}"


def meet(place: ProcessVariables, device: str) -> Store:
    """The store that all ranks share, once they have all come and agree on who they are.

    Rank 0 calls the roll and writes its verdict for all. `device` is this rank's, as torch writes it (`cuda:0`, `cpu`).

    Raises:
        CannotRun: they do not come or do not agree; on every rank that is there.
    """
    own = Presence(
        rank=place.rank,
        world_size=place.world_size,
        host=socket.gethostname(),
        process_id=os.getpid(),
        local_rank=place.local_rank,
        device=device,
    )
    assert place.meeting_point is not None, "a process alone meets nobody"
    at, patience = place.meeting_point, Patience(_seconds())
    store = _store(own, at, patience)
    roll = PrefixStore("roll", store)
    try:
        _announce(roll, own)
        verdict = _call_roll(roll, own, patience) if own.rank == 0 else _await_verdict(roll, own, patience)
    except DistError:
        raise CannotRun(
            f"rank {own.rank} on {own.host} lost rank 0 at {at} while the ranks met; rank 0's own output says why"
        ) from None
    if verdict != _AGREED:
        raise CannotRun(verdict)
    return PrefixStore("group", store)


class Patience:
    """How long ranks wait for each other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.is_over_by(0.0)

    def is_over_by(self, seconds: float) -> bool:
        return self._passed >= self.seconds + seconds

    @property
    def deserves_remark(self) -> bool:
        return self._passed >= _REMARK_SECONDS

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begun


def _seconds() -> float:
    text = os.environ.get(SECONDS, "")
    try:
        seconds = float(text or DEFAULT_SECONDS)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise CannotRun(f"the environment variable {SECONDS} is {text!r}; it must be a number of seconds above 0")
    return seconds


def _store(own: Presence, at: Address, patience: Patience) -> Store:
    # torch elastic's agent has a store for its ranks already; every restart of them has a room of its own in it.
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_agents else "0"
    is_host = own.rank == 0 and not is_agents
    if not is_host:
        _await_host(own, at, patience)
    try:
        timeout = timedelta(seconds=patience.seconds)
        store = TCPStore(at.host, at.port, is_master=is_host, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, OSError) as problem:
        raise CannotRun(_no_host(own, at, problem) if is_host else _unreachable(own, at, patience)) from None
    return PrefixStore(f"dsplan/{attempt}", store)


def _await_host(own: Presence, at: Address, patience: Patience) -> None:
    """Wait until something answers at rank 0's address; torch's own wait prints pages.

    Raises:
        CannotRun: there is no such host, or nothing answers in time.
    """
    while True:
        try:
            with socket.create_connection((at.host, at.port), timeout=_TRY_SECONDS) as answered:
                # Linux connects a socket to itself where it happens to take the port that it calls.
                if answered.getsockname() != answered.getpeername():
                    return
        except socket.gaierror as problem:
            raise CannotRun(
                f"rank {own.rank} on {own.host} finds no host {at.host!r} ({problem.strerror}); set MASTER_ADDR to a"
                " name or address of rank 0's host that every node knows"
            ) from None
        except OSError:
            if patience.is_over:
                raise CannotRun(_unreachable(own, at, patience)) from None
            time.sleep(_LOOK_SECONDS)


def _no_host(own: Presence, at: Address, problem: Exception) -> str:
    line = str(problem).strip().splitlines()[0]
    reason = "address already in use" if "EADDRINUSE" in line else line
    return (
        f"rank 0 on {own.host} cannot listen at {at} ({reason}); another process is rank 0 too, or another program has"
        " the port: set MASTER_PORT to a free one on every rank"
    )


def _unreachable(own: Presence, at: Address, patience: Patience) -> str:
    return (
        f"rank {own.rank} on {own.host} cannot reach rank 0 at {at} within {patience.seconds:g} s; check MASTER_ADDR"
        " and MASTER_PORT, that rank 0 runs there, and that no firewall is between"
    )


def _announce(roll: Store, own: Presence) -> None:
    """Write this rank's line; the first of two processes with one rank keeps it.

    Raises:
        CannotRun: this process is the second.
    """
    text = json.dumps(asdict(own))
    first = roll.compare_set(f"rank-{own.rank}", "", text).decode()
    if first != text:
        other = Presence(**json.loads(first))
        refusal = (
            f"{other.where} and {own.where} are both rank {own.rank} of {own.world_size}; give every process its own"
            " RANK"
        )
        roll.set("refusal", refusal)  # for those who wait for the rank that this process should have been
        raise CannotRun(refusal)


def _call_roll(roll: Store, own: Presence, patience: Patience) -> str:
    """Rank 0: wait for everyone, and write what came of it where everyone reads it."""
    present: dict[int, Presence] = {}
    remarked = False
    verdict = ""
    while not verdict:
        missing = _look(roll, own.world_size, present)
        verdict = _objection(roll, own, present) or ("" if missing else _AGREED)
        if not verdict and patience.is_over:
            verdict = (
                f"{_wait_text(own, missing)} within {patience.seconds:g} s; start {own.world_size} processes, or"
                " correct WORLD_SIZE"
            )
        elif not verdict and patience.deserves_remark and not remarked:
            remarked = True
            print(f"dsplan: {_wait_text(own, missing)}; still waiting", file=sys.stderr, flush=True)
        if not verdict:
            time.sleep(_LOOK_SECONDS)
    roll.set("verdict", verdict)
    if verdict != _AGREED:
        _let_read(roll, others=own.world_size - 1)
    return verdict


def _look(roll: Store, world_size: int, present: dict[int, Presence]) -> list[int]:
    """Read the lines that are there and not yet known; the ranks that have none."""
    missing = []
    for rank in range(world_size):
        if rank in present:
            continue
        # `check` answers at once whether a key is there; `get` would wait for it.
        if roll.check([f"rank-{rank}"]):
            present[rank] = Presence(**json.loads(roll.get(f"rank-{rank}")))
        else:
            missing.append(rank)
    return missing


def _objection(roll: Store, own: Presence, present: dict[int, Presence]) -> str:
    """What is wrong among the ranks that are there; nothing where all agree."""
    if roll.check(["refusal"]):
        return str(roll.get("refusal").decode())
    seen: dict[tuple[str, str], Presence] = {}
    for rank in sorted(present):
        one = present[rank]
        if one.world_size != own.world_size:
            return (
                f"rank {own.rank} ({own.where}) counts {own.world_size} ranks and rank {rank} ({one.where}) counts"
                f" {one.world_size}; give all of them one WORLD_SIZE"
            )
        other = seen.setdefault((one.host, one.device), one)
        if other is not one and one.device != "cpu":
            return (
                f"rank {other.rank} and rank {rank} both use {one.device} of {one.host}; set LOCAL_RANK to count the"
                " ranks of each node from 0"
            )
    return ""


def _await_verdict(roll: Store, own: Presence, patience: Patience) -> str:
    """The other ranks: what rank 0 says."""
    # Rank 0 may have begun later: its verdict, which names who is missing, is worth a moment more.
    while not roll.check(["verdict"]):
        if patience.is_over_by(_READ_SECONDS):
            return f"{_wait_text(own, [0])} within {patience.seconds:g} s; start it, with the same MASTER_ADDR"
        time.sleep(_LOOK_SECONDS)
    verdict = str(roll.get("verdict").decode())
    if verdict != _AGREED:
        roll.add("read", 1)
    return verdict


def _let_read(roll: Store, *, others: int) -> None:
    """The store ends with this process: give the other ranks, and those that are just coming, a moment to read why."""
    until = time.monotonic() + _READ_SECONDS
    while time.monotonic() < until and roll.add("read", 0) < others:
        time.sleep(_LOOK_SECONDS)


def _wait_text(own: Presence, missing: list[int]) -> str:
    named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    ranks = f"rank {named} has" if len(missing) == 1 else f"ranks {named} have"
    return f"rank {own.rank} of {own.world_size} on {own.host} is ready and {ranks} not come"
