"""Hosts, addresses and ports: looked up and tried within seconds. No torch."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

TRY_SECONDS = 3.0
"""How long one question, to a name server or to a host, may go unanswered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """A network interface that is up, with its IPv4 address."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def list_interfaces() -> list[Interface]:
    """List the interfaces of this host that are up and have an IPv4 address, in the system's order."""
    import psutil  # only where it is needed: 10 ms of every other start

    by_name, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return [
        Interface(name=name, address=address.address)
        for _, name in socket.if_nameindex()
        if name in states and states[name].isup
        for address in by_name.get(name, ())
        if address.family == socket.AF_INET
    ]


def is_own_address(host: str) -> bool:
    """Return whether a name or address is one of this host's; not where nobody knows the name."""
    try:
        candidates = look_up(host)
    except OSError:
        return False
    for address in candidates:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as tried:
            try:
                tried.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def find_free_port() -> int:
    """Return a port of this host that nothing has now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.bind(("", 0))
        port: int = tried.getsockname()[1]
    return port


def look_up(host: str) -> list[str]:
    """Look up the addresses behind a name.

    Raises:
        OSError: nobody knows the name, or no name server answers, which libc alone would wait for for half a minute.
    """
    outcome: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            outcome.append([str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)])
        except OSError as problem:
            outcome.append(problem)

    asking = threading.Thread(target=ask, name="name-lookup", daemon=True)
    asking.start()
    asking.join(TRY_SECONDS)
    if not outcome:
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def is_listening(host: str, port: int) -> bool:
    """Return whether something listens at a port of a host.

    Raises:
        gaierror: there is no such host.
    """
    return why_unanswered(host, port) is None


def why_unanswered(host: str, port: int) -> str | None:
    """Return why nothing answers at a port of a host, in the system's words; None where something listens there.

    Raises:
        gaierror: there is no such host.
    """
    why = "Connection refused"
    for address in look_up(host):
        try:
            with socket.create_connection((address, port), timeout=TRY_SECONDS) as answered:
                # Linux connects a socket to itself where it happens to take the port that it calls.
                if answered.getsockname() != answered.getpeername():
                    return None
        except TimeoutError:
            why = "no answer"
        except OSError as problem:
            why = problem.strerror or str(problem)
    return why


def speaks_http(host: str, port: int) -> bool | None:
    """Return whether a web server listens at a port, or None if whatever listens says nothing at all."""
    try:
        with socket.create_connection((host, port), timeout=TRY_SECONDS) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except TimeoutError:
        return None
    except OSError:
        return False
