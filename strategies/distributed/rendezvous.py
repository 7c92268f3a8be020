"""Rendezvous: all ranks find each other, and are checked against each other, before the first collective.

A collective among ranks that disagree hangs, or ends after torch's half hour with a message that names no cause. Here
every rank writes who it is into the store at rank 0, reads who the others are, and says in one line what is wrong: two
processes with one rank, a wrong world size, one GPU for two ranks, a rank that never came, an address nobody answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError

from hardware_db.units import format_seconds
from strategies.distributed.launcher_env import Address, ProcessVariables
from strategies.distributed.network import TRY_SECONDS, is_listening, is_own_address
from strategies.distributed.rank_check import (
    AGAIN_SECONDS,
    FIRST_SECONDS,
    LOOK_SECONDS,
    READ_SECONDS,
    Patience,
    Presence,
    check_ranks,
)
from strategies.errors import CannotMeet
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.torch_compat.distributed import PrefixStore, Store, TCPStore
from strategies.variables import RUN_DIRECTORY

_ANSWER = timedelta(seconds=FIRST_SECONDS)
_ASK_SECONDS, _LEAST_ASK_SECONDS = 4.0, 0.5


@dataclass(kw_only=True, slots=True)
class _Met:
    """The store of the ranks that this process has met, and how often it checked the ranks in it."""

    rank: int
    at: Address
    attempt: str
    store: Store
    times: int = 0


_met: _Met | None = None


def meet(process: ProcessVariables, device: str, complaint: str = "") -> Store:
    """Return the store that all ranks share, once they have all come and agree on who they are.

    Rank 0 checks the ranks and writes its verdict for all. `device` is this rank's, as torch writes it (`cuda:0`,
    `cpu`); a `complaint` about this rank's own place ends all of them. Ranks that have met before, or that torch
    elastic's agents started once they had met, have a longer limit, since each of them is known to be there; under
    `dsplan run` the latter no longer one than what it takes for a hang.

    Raises:
        CannotMeet: they do not come or do not agree; on every rank that is there.
    """
    global _met
    at, attempt = process.meeting_point, _attempt()
    assert at is not None, "a process alone meets nobody"
    own = _own_presence(process, device, complaint)
    met, _met = _met, None
    if met is not None and (met.rank, met.at, met.attempt) == (process.rank, at, attempt):
        patience = Patience(AGAIN_SECONDS, least=AGAIN_SECONDS)
    else:
        met = None  # an earlier store without a reference to it frees its port
        patience = Patience(_stranger_seconds(process))
        store = PrefixStore(f"dsplan/{attempt}", _open_store(own, at, patience))
        met = _Met(rank=own.rank, at=at, attempt=attempt, store=store)
    met.times += 1
    try:
        check_ranks(PrefixStore(f"roll-{met.times}", met.store), own, patience)
    except DistError:
        raise CannotMeet(
            f"rank {own.rank} on {own.host} lost rank 0 at {at} while the ranks met; rank 0's own output says why"
        ) from None
    met.store.set_timeout(timedelta(seconds=AGAIN_SECONDS))
    _met = met
    return PrefixStore(f"group-{met.times}", met.store)


def notify_end() -> None:
    """Notify those that would wait for this rank at the next rank check that its script has ended with status 0."""
    if _met is None:
        return
    refusal = (
        f"rank {_met.rank} on {socket.gethostname()} ended with status 0 before the others met it; let every rank call"
        " dsplan.initialize, or start fewer ranks"
    )
    with contextlib.suppress(DistError, RuntimeError):
        PrefixStore(f"roll-{_met.times + 1}", _met.store).set("refusal", refusal)


def _own_presence(process: ProcessVariables, device: str, complaint: str) -> Presence:
    host, at = socket.gethostname(), process.meeting_point
    is_elsewhere = process.rank == 0 and at is not None and not _is_agents() and not is_own_address(at.host)
    elsewhere = f"MASTER_ADDR {at.host} is no address of {host}, where rank 0 runs" if at and is_elsewhere else ""
    return Presence(
        rank=process.rank,
        world_size=process.world_size,
        host=host,
        process_id=os.getpid(),
        local_rank=process.local_rank,
        device=device,
        complaint=complaint,
        advice=process.advice or elsewhere,
        is_elsewhere=is_elsewhere,
    )


def _attempt() -> str:
    """Return the prefix of this start: torch elastic's agent has one store for its ranks, whenever it restarts them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _is_agents() else "0"


def _is_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _stranger_seconds(process: ProcessVariables) -> float:
    """Return how long ranks that never met wait. If somebody changed their number, no agent has started all."""
    if not _is_agents() or os.environ.get("ROLE_WORLD_SIZE") != str(process.world_size):
        return FIRST_SECONDS
    directory = os.environ.get(RUN_DIRECTORY)
    options = None if directory is None else AttemptOptions.load(Path(directory))
    hang_seconds = (0.0 if options is None else options.supervision.hang_seconds) or AGAIN_SECONDS
    return max(FIRST_SECONDS, min(AGAIN_SECONDS, hang_seconds))


def _open_store(own: Presence, at: Address, patience: Patience) -> Store:
    host, is_host = at.host, own.rank == 0 and not _is_agents()
    if own.is_elsewhere:
        # Another process may be rank 0 there. If not: rank 0 listens on every address of its host, and under a name
        # that only others can use (a port that a container forwards) they reach it all the same.
        with contextlib.suppress(socket.gaierror):
            is_host = not is_listening(at.host, at.port)
        host = "localhost" if is_host else host
    elif not is_host:
        _await_host(own, at, patience)
    if not is_host:
        if store := find_store(at, patience.left):
            return store
        raise CannotMeet(_unreachable(own, at, patience))
    try:
        # Multi-tenant: a script that meets by itself at MASTER_PORT later finds this server instead of a taken port.
        with _without_pages():
            return TCPStore(host, at.port, is_master=True, timeout=_ANSWER, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as problem:
        # Where another process is rank 0 too, the rank check in its store reports it to both of them.
        if store := find_store(at, READ_SECONDS):
            return store
        raise CannotMeet(_no_host(own, at, problem)) from None


def find_store(at: Address, seconds: float) -> Store | None:
    """Return the store at an address, or None if none answers in time.

    In a thread, for torch waits for ever where another program says nothing. Where one says something else torch asks
    again, by seconds longer than it was told to: so it is asked for a few at a time.
    """
    stores: list[Store] = []
    until = time.monotonic() + seconds

    def ask() -> None:
        while not stores and (left := until - time.monotonic()) > 0:
            timeout = timedelta(seconds=max(_LEAST_ASK_SECONDS, min(_ASK_SECONDS, left)))
            with contextlib.suppress(RuntimeError, OSError):
                stores.append(TCPStore(at.host, at.port, is_master=False, timeout=timeout, wait_for_workers=False))

    asking = threading.Thread(target=ask, name="rendezvous", daemon=True)
    with _without_pages():
        asking.start()
        asking.join(seconds + TRY_SECONDS)
    return stores[0] if stores else None


@contextlib.contextmanager
def _without_pages() -> Iterator[None]:
    """Silence stderr: torch's C++ prints pages where another program answers or a host's address has no name."""
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(null)
        os.close(stderr)


def _await_host(own: Presence, at: Address, patience: Patience) -> None:
    """Wait until something answers at rank 0's address; torch's own wait prints pages.

    Raises:
        CannotMeet: there is no such host, or nothing answers in time.
    """
    while True:
        refusal = _unreachable(own, at, patience)
        try:
            if is_listening(at.host, at.port):
                return
        except socket.gaierror as problem:
            # A name may be new: Kubernetes makes one when rank 0's pod runs.
            refusal = (
                f"rank {own.rank} on {own.host} finds no host {at.host!r} ({problem.strerror}); set MASTER_ADDR to a"
                " name or address of rank 0's host that every node knows"
            )
        if patience.is_over_by():
            raise CannotMeet(refusal)
        time.sleep(LOOK_SECONDS)


def _no_host(own: Presence, at: Address, problem: Exception) -> str:
    line = str(problem).strip().splitlines()[0]
    reason = "address already in use" if "EADDRINUSE" in line else line
    return (
        f"rank 0 on {own.host} cannot listen at {at} ({reason}); another program has the port: set MASTER_PORT to a"
        " free one on every rank"
    )


def _unreachable(own: Presence, at: Address, patience: Patience) -> str:
    advice = f"; {own.advice}" if own.advice else ""
    return (
        f"rank {own.rank} on {own.host} cannot reach rank 0 at {at} within {format_seconds(patience.seconds)};"
        f" check MASTER_ADDR and MASTER_PORT, that rank 0 runs there, and that no firewall is between{advice}"
    )
