"""The store in which the nodes of a run meet, in a process of its own on the node whose address they were given.

Run as `python -m strategies.launch.elastic.rendezvous_store PORT PARENT_PID`. It outlives the agents, which come and
go with the attempts, and ends with the `dsplan run` that started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hardware_db.errors import DsplanError
from hardware_db.units import format_seconds
from strategies.distributed.launcher_env import Address
from strategies.distributed.network import is_listening, is_own_address, look_up
from strategies.launch.elastic.place import die_with_parent

STORE_LOG = "rendezvous.log"
_START_SECONDS = 60.0  # importing torch takes seconds, on a loaded machine many


def main(port: str, parent: str) -> int:
    """Serve the store until the parent ends."""
    die_with_parent(signal.SIGKILL, int(parent))
    from strategies.torch_compat.distributed import (
        TCPStore,  # here, so that the command that starts this imports no torch
    )

    try:
        store = TCPStore("localhost", int(port), is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        print(str(error).strip().splitlines()[0], flush=True)
        return 1
    while store is not None:
        signal.pause()
    return 0


def ensure_store(at: Address, directory: Path, environment: dict[str, str]) -> None:
    """Start the store where `at` is an address of this machine and nothing answers there yet.

    Raises:
        DsplanError: there is no such host, or the store cannot be served at that port.
    """
    if not is_here(at.host) or _answers(at):
        return
    command = [sys.executable, "-m", "strategies.launch.elastic.rendezvous_store", str(at.port), str(os.getpid())]
    with (directory / STORE_LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(at):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            if _answers(at):  # another `dsplan run` of this machine was faster
                return
            reason = (directory / STORE_LOG).read_text().strip() or f"nothing within {format_seconds(_START_SECONDS)}"
            raise DsplanError(f"the nodes cannot meet at {at}: {reason}; give --rendezvous a free port on every node")
        time.sleep(0.05)


def is_here(host: str) -> bool:
    """Return whether a host is this machine: one can listen at its address.

    Raises:
        DsplanError: nobody knows such a host.
    """
    try:
        look_up(host)
    except OSError as problem:
        raise DsplanError(
            f"--rendezvous: there is no host {host!r} ({problem.strerror}); give a name or an address of one node that"
            " every node knows"
        ) from None
    return is_own_address(host)


def _answers(at: Address) -> bool:
    with suppress(OSError):
        return is_listening(at.host, at.port)
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
