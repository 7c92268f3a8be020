"""Network interfaces, this host's name, and ports: whom gloo and NCCL would talk through. No torch.

Gloo takes the interface that GLOO_SOCKET_IFNAME names, else the address of the host's own name, else loopback
(torch, ProcessGroupGloo::createDefaultDevice). NCCL takes NCCL_SOCKET_IFNAME, else `ib*`, else what is neither `lo`
nor `docker*`, then these (NCCL's guide, "NCCL_SOCKET_IFNAME").
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from hardware_db.files import read_text
from strategies.distributed.network import Interface, addresses, interfaces
from strategies.doctor.finding import Finding

_USUAL_PORT = 29500
_FEW_PORTS = 1000


def network_findings(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Interfaces and the two libraries' choice among them, the host's name, ports."""
    here = interfaces()
    name = socket.gethostname()
    try:
        known = addresses(name)
    except OSError:
        known = []
    return [
        *_named_interfaces(here, variables),
        _choice(here, known, variables),
        _host_name(name, known, variables),
        _usual_port(),
        *_port_range(),
    ]


def nccl_choice(here: Sequence[Interface], variables: Mapping[str, str]) -> Interface | None:
    """The interface that NCCL takes for its sockets."""
    asked = variables.get("NCCL_SOCKET_IFNAME", "")
    if asked:
        return next((interface for interface in here if _matches(interface.name, asked)), None)
    order = [
        [interface for interface in here if interface.name.startswith("ib")],
        [interface for interface in here if not interface.name.startswith(("lo", "docker"))],
        [interface for interface in here if interface.name.startswith("docker")],
        list(here),
    ]
    return next((group[0] for group in order if group), None)


def gloo_choice(here: Sequence[Interface], known: Sequence[str], variables: Mapping[str, str]) -> Interface | None:
    """The interface that gloo takes, where `known` are the addresses of the host's own name."""
    asked = variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if asked:
        return next((interface for interface in here if interface.name == asked), None)
    by_name = [interface for address in known for interface in here if interface.address == address]
    return next(iter(by_name or [interface for interface in here if interface.name == "lo"]), None)


def _matches(name: str, asked: str) -> bool:
    """NCCL's syntax: prefixes separated by commas, `=` for whole names, `^` for all but these."""
    negated, exact = asked.startswith("^"), asked.lstrip("^").startswith("=")
    wanted = asked.lstrip("^=").split(",")
    hit = name in wanted if exact else any(name.startswith(prefix) for prefix in wanted)
    return hit is not negated


def _named_interfaces(here: Sequence[Interface], variables: Mapping[str, str]) -> list[Finding]:
    there = ", ".join(dict.fromkeys(interface.name for interface in here)) or "none"
    choices = {
        "GLOO_SOCKET_IFNAME": gloo_choice(here, [], variables),
        "NCCL_SOCKET_IFNAME": nccl_choice(here, variables),
    }
    return [
        Finding(
            level="problem",
            check="interface",
            message=f"{variable} is {variables[variable]!r} and no interface that is up has that name",
            remedy=f"unset it or name one of {there}",
        )
        for variable, choice in choices.items()
        if variables.get(variable) and choice is None
    ]


def _choice(here: Sequence[Interface], known: Sequence[str], variables: Mapping[str, str]) -> Finding:
    gloo, nccl = gloo_choice(here, known, variables), nccl_choice(here, variables)
    return Finding(check="interface", message=f"gloo would use {gloo or 'none'}, NCCL {nccl or 'none'}")


def _host_name(name: str, known: Sequence[str], variables: Mapping[str, str]) -> Finding:
    if not known:
        return Finding(
            level="warning",
            check="host name",
            message=f"no name server and no /etc/hosts knows this host's name {name!r}",
            remedy="other nodes need an address for MASTER_ADDR; add the name to DNS or to /etc/hosts",
        )
    outside = [address for address in known if not ip_address(address.split("%")[0]).is_loopback]
    if outside or variables.get("GLOO_SOCKET_IFNAME"):
        return Finding(check="host name", message=f"{name} is {outside[0] if outside else known[0]}")
    return Finding(
        level="warning",
        check="host name",
        message=f"this host's name {name!r} is {known[0]}, a loopback address, where gloo would let other nodes look",
        remedy="on several nodes set GLOO_SOCKET_IFNAME to the interface that joins them (dsplan run does), or correct"
        " /etc/hosts",
    )


def _usual_port() -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", _USUAL_PORT))
        except OSError:
            return Finding(
                level="warning",
                check="ports",
                message=f"port {_USUAL_PORT}, torch's default MASTER_PORT, is taken",
                remedy="set MASTER_PORT to another one for jobs that start here by torchrun's variables",
            )
    return Finding(check="ports", message=f"port {_USUAL_PORT}, torch's default MASTER_PORT, is free")


def _port_range() -> list[Finding]:
    words = (read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")) or "").split()
    if len(words) != 2 or int(words[1]) - int(words[0]) >= _FEW_PORTS:
        return []
    return [
        Finding(
            level="warning",
            check="ports",
            message=f"only ports {words[0]} to {words[1]} are given to outgoing connections",
            remedy="widen net.ipv4.ip_local_port_range: every pair of ranks needs one",
        )
    ]
