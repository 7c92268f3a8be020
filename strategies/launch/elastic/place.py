"""A rank takes its place: who it is, as whoever started it says, and who it ends with. No torch."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import MutableMapping

from strategies.distributed.launcher_env import ProcessVariables, read_own_variables
from strategies.distributed.network import list_interfaces
from strategies.run_directory.spec import LaunchSpec
from strategies.variables import AGENT_PID

_LOG = logging.getLogger(__name__)

# Ask the kernel to end this process when the one that started it ends, so that no rank outlives its run.


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal_number: signal.Signals, parent: int) -> None:
    """Receive `signal_number` when process `parent` dies (Linux; elsewhere nothing is asked).

    A parent that died before the request was made is noticed by its changed process id.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


_GLOO = "GLOO_SOCKET_IFNAME"


def take_place(spec: LaunchSpec) -> ProcessVariables:
    """Return this rank's place, with torchrun's variables set to it; it ends with the process that started it.

    Raises:
        CannotRun: what the launcher's variables say contradicts itself.
    """
    if spec.placement.launcher != "slurm":  # slurmstepd ends its tasks itself, also those that others have started
        die_with_parent(signal.SIGKILL, int(os.environ.get(AGENT_PID) or os.getppid()))
    process = read_own_variables()
    if process.meeting_point is not None and process.local_world_size < process.world_size:
        choose_interface(process.meeting_point.host, os.environ)
    return process


def choose_interface(host: str, variables: MutableMapping[str, str]) -> None:
    """Tell gloo which network to use between nodes, unless somebody has: the one on which rank 0's host is reached.

    By itself gloo takes the address that this host's own name has, which in many an /etc/hosts is a loopback one.
    """
    if _GLOO in variables:
        return
    name = interface_of(address_towards(host))
    if name:
        variables[_GLOO] = name


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches `host`; empty where there is no way to it."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as asking:
                asking.connect(address)  # of a datagram socket: chooses the way, sends nothing
                return str(asking.getsockname()[0])
    except OSError as problem:
        _LOG.debug("no way to %s: %s", host, problem)
    return ""


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address; empty where none has it."""
    return next((interface.name for interface in list_interfaces() if interface.address == address), "")
