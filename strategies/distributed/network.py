"""Whether a host can be found and reached, known within seconds. No torch."""

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


def interfaces() -> list[Interface]:
    """The interfaces of this host that are up and have an IPv4 address, in the system's order."""
    import psutil  # only where it is asked: 10 ms of every other start

    found, states = psutil.net_if_addrs(), psutil.net_if_stats()
    return [
        Interface(name=name, address=address.address)
        for _, name in socket.if_nameindex()
        if name in states and states[name].isup
        for address in found.get(name, ())
        if address.family == socket.AF_INET
    ]


def is_own_address(host: str) -> bool:
    """Whether a name or address is one of this host's; not where nobody knows the name."""
    try:
        found = addresses(host)
    except OSError:
        return False
    for address in found:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as tried:
            try:
                tried.bind((address, 0))
            except OSError:
                continue
            return True
    return False


def free_port() -> int:
    """A port of this host that nothing has now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.bind(("", 0))
        port: int = tried.getsockname()[1]
    return port


def addresses(host: str) -> list[str]:
    """The addresses behind a name.

    Raises:
        OSError: nobody knows the name, or no name server answers, which libc alone would wait for for half a minute.
    """
    found: list[list[str] | OSError] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.append([str(answer[4][0]) for answer in answers])
        except OSError as problem:
            found.append(problem)

    asking = threading.Thread(target=ask, name="name-lookup", daemon=True)
    asking.start()
    asking.join(TRY_SECONDS)
    if not found:
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def answers(host: str, port: int) -> bool:
    """Whether something listens at a port of a host.

    Raises:
        gaierror: there is no such host.
    """
    return unanswered(host, port) == ""


def unanswered(host: str, port: int) -> str:
    """Why nothing answers at a port of a host, in the system's words; empty where something listens there.

    Raises:
        gaierror: there is no such host.
    """
    why = "Connection refused"
    for address in addresses(host):
        try:
            with socket.create_connection((address, port), timeout=TRY_SECONDS) as answered:
                # Linux connects a socket to itself where it happens to take the port that it calls.
                if answered.getsockname() != answered.getpeername():
                    return ""
        except TimeoutError:
            why = "no answer"
        except OSError as problem:
            why = problem.strerror or str(problem)
    return why


def speaks_http(host: str, port: int) -> bool | None:
    """Return whether a web server listens at a port, or None if whatever listens says nothing at all."""
    try:
        with socket.create_connection((host, port), timeout=TRY_SECONDS) as asked:
            asked.sendall(b"GET / HTTP/1.0\r\n\r\n")
            said = asked.recv(5)
    except TimeoutError:
        return None
    except OSError:
        return False
    return said == b"HTTP/"
