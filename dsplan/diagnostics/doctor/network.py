"""Network interfaces, this host's name, and ports, through which gloo and NCCL would talk. No torch.

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

from dsplan.diagnostics.doctor.finding import Finding
from hardware_db.files import read_text
from strategies.distributed.network import Interface, list_interfaces, look_up

_USUAL_PORT = 29500
_FEW_PORTS = 1000


def network_findings(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check interfaces and the two libraries' choice among them, the host's name, ports."""
    here = list_interfaces()
    name = socket.gethostname()
    try:
        addresses = look_up(name)
    except OSError:
        addresses = []
    return [
        *_check_variables(here, variables),
        _report_choice(here, addresses, variables),
        _check_host_name(name, addresses, variables),
        _check_usual_port(),
        *_check_port_range(),
    ]


def nccl_choice(here: Sequence[Interface], variables: Mapping[str, str]) -> Interface | None:
    """Return the interface that NCCL takes for its sockets."""
    if pattern := variables.get("NCCL_SOCKET_IFNAME"):
        return next((interface for interface in here if _matches(interface.name, pattern)), None)
    order = [
        [interface for interface in here if interface.name.startswith("ib")],
        [interface for interface in here if not interface.name.startswith(("lo", "docker"))],
        [interface for interface in here if interface.name.startswith("docker")],
        list(here),
    ]
    return next((group[0] for group in order if group), None)


def gloo_choice(here: Sequence[Interface], addresses: Sequence[str], variables: Mapping[str, str]) -> Interface | None:
    """Return the interface that gloo takes, where `addresses` are those of the host's own name."""
    if first := variables.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return next((interface for interface in here if interface.name == first), None)
    by_name = [interface for address in addresses for interface in here if interface.address == address]
    return next(iter(by_name or [interface for interface in here if interface.name == "lo"]), None)


def _matches(name: str, pattern: str) -> bool:
    """Match NCCL's syntax: prefixes separated by commas, `=` for whole names, `^` for all but these."""
    negated, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    wanted = pattern.lstrip("^=").split(",")
    hit = name in wanted if exact else any(name.startswith(prefix) for prefix in wanted)
    return hit is not negated


def _check_variables(here: Sequence[Interface], variables: Mapping[str, str]) -> list[Finding]:
    there = ", ".join(dict.fromkeys(interface.name for interface in here)) or "none"
    choices = {
        "GLOO_SOCKET_IFNAME": gloo_choice(here, [], variables),
        "NCCL_SOCKET_IFNAME": nccl_choice(here, variables),
    }
    return [
        Finding.problem(
            "interface",
            f"{variable} is {variables[variable]!r} and no interface that is up has that name",
            f"unset it or name one of {there}",
        )
        for variable, choice in choices.items()
        if variables.get(variable) and choice is None
    ]


def _report_choice(here: Sequence[Interface], addresses: Sequence[str], variables: Mapping[str, str]) -> Finding:
    gloo, nccl = gloo_choice(here, addresses, variables), nccl_choice(here, variables)
    return Finding(check="interface", message=f"gloo would use {gloo or 'none'}, NCCL {nccl or 'none'}")


def _check_host_name(name: str, addresses: Sequence[str], variables: Mapping[str, str]) -> Finding:
    if not addresses:
        return Finding.warning(
            "host name",
            f"no name server and no /etc/hosts knows this host's name {name!r}",
            "other nodes need an address for MASTER_ADDR; add the name to DNS or to /etc/hosts",
        )
    outside = [address for address in addresses if not ip_address(address.split("%")[0]).is_loopback]
    if outside or variables.get("GLOO_SOCKET_IFNAME"):
        return Finding(check="host name", message=f"{name} is {outside[0] if outside else addresses[0]}")
    return Finding.warning(
        "host name",
        f"this host's name {name!r} is {addresses[0]}, a loopback address, where gloo would let other nodes look",
        "on several nodes set GLOO_SOCKET_IFNAME to the interface that joins them (dsplan run does), or correct"
        " /etc/hosts",
    )


def _check_usual_port() -> Finding:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", _USUAL_PORT))
        except OSError:
            return Finding.warning(
                "ports",
                f"port {_USUAL_PORT}, torch's default MASTER_PORT, is taken",
                "set MASTER_PORT to another one for jobs that start here by torchrun's variables",
            )
    return Finding(check="ports", message=f"port {_USUAL_PORT}, torch's default MASTER_PORT, is free")


def _check_port_range() -> list[Finding]:
    words = (read_text(Path("/proc/sys/net/ipv4/ip_local_port_range")) or "").split()
    if len(words) != 2 or int(words[1]) - int(words[0]) >= _FEW_PORTS:
        return []
    return [
        Finding.warning(
            "ports",
            f"only ports {words[0]} to {words[1]} are given to outgoing connections",
            "widen net.ipv4.ip_local_port_range: every pair of ranks needs one",
        )
    ]
