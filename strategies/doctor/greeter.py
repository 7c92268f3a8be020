"""Greeter: answers whoever connects with this host's clock, so that others learn that they reach it and what time it is
here. No torch."""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass

_ASKED = 7
_LIMIT_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    """What a call brought: `ahead_seconds` is the other clock less this one, `round_trip_seconds` the quickest answer.

    `problem` says why there was none; empty where there was.
    """

    ahead_seconds: float = 0.0
    round_trip_seconds: float = 0.0
    problem: str = ""


class Greeter:
    """A port that tells the time until it is closed; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=128)
        self._thread = threading.Thread(target=self._serve, name="doctor-greeter", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def __enter__(self) -> Greeter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_tell_time, args=(caller,), name="doctor-answer", daemon=True).start()


def _tell_time(caller: socket.socket) -> None:
    with caller:
        caller.settimeout(_LIMIT_SECONDS)
        try:
            while caller.recv(1):
                caller.sendall(struct.pack("!d", time.time()))
        except OSError:
            return


def greet(host: str, port: int) -> Greeting:
    """Call a greeter, and read its clock as Cristian's algorithm does: against the middle of the quickest exchange."""
    try:
        with socket.create_connection((host, port), timeout=_LIMIT_SECONDS) as called:
            called.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            exchanges = [_exchange(called) for _ in range(_ASKED)]
    except OSError as problem:
        return Greeting(problem=problem.strerror or str(problem) or type(problem).__name__)
    round_trip, ahead = min(exchanges)
    return Greeting(ahead_seconds=ahead, round_trip_seconds=round_trip)


def _exchange(called: socket.socket) -> tuple[float, float]:
    asked = time.time()
    called.sendall(b"?")
    answer = b""
    while len(answer) < 8:
        part = called.recv(8 - len(answer))
        if not part:
            raise ConnectionResetError(0, "the connection was closed")
        answer += part
    heard = time.time()
    return heard - asked, float(struct.unpack("!d", answer)[0]) - (asked + heard) / 2
