"""MPI's calls between threads of one process, as far as dsplan.mpi makes them, for machines without an MPI library."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

_WAIT_SECONDS = 60.0


class _Room:
    """The room in which the ranks of a communicator exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_WAIT_SECONDS)
        self.values: list[Any] = [None] * size
        self.rooms: dict[Any, _Room] = {}


class Intracomm:
    """One rank's end of a communicator."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self.rank, self.size = room, rank, room.size

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.size

    def allgather(self, value: Any) -> list[Any]:
        self._room.values[self.rank] = copy.deepcopy(value)
        self._room.barrier.wait()
        gathered = copy.deepcopy(self._room.values)
        self._room.barrier.wait()
        return gathered

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        gathered = self.allgather(value)
        return gathered if root == self.rank else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def Allreduce(self, _: object, buffer: Any, op: Callable[[Any], Any]) -> None:  # noqa: N802
        buffer[...] = op(self.allgather(buffer))

    def Reduce_scatter(self, buffer: Any, part: Any, counts: list[int], op: Callable[[Any], Any]) -> None:  # noqa: N802
        first = sum(counts[: self.rank])
        part[...] = op(self.allgather(buffer))[first : first + counts[self.rank]]

    def Allgatherv(self, part: list[Any], whole: list[Any]) -> None:  # noqa: N802
        whole[0][...] = np.concatenate(self.allgather(part[0]))

    def Gather(self, part: list[Any], whole: list[Any] | None, root: int = 0) -> None:  # noqa: N802
        parts = self.gather(part[0], root)
        if whole is not None and parts is not None:
            whole[0][...] = np.concatenate(parts)

    def Bcast(self, buffer: list[Any], root: int = 0) -> None:  # noqa: N802
        buffer[0][...] = self.bcast(buffer[0], root)

    def Split(self, color: int, key: int) -> Intracomm:  # noqa: N802
        everyone = self.allgather((color, key))
        members = sorted((other[1], rank) for rank, other in enumerate(everyone) if other[0] == color)
        with _LOCK:
            room = self._room.rooms.setdefault(color, _Room(len(members)))
        self._room.barrier.wait()
        self._room.rooms.pop(color, None)
        self._room.barrier.wait()
        return Intracomm(room, [rank for _, rank in members].index(self.rank))

    def Free(self) -> None:  # noqa: N802
        self._room.barrier.wait()


_LOCK = threading.Lock()
MPI = SimpleNamespace(
    Intracomm=Intracomm,
    COMM_NULL=None,
    IN_PLACE=object(),
    BYTE=object(),
    SUM=lambda values: np.sum(values, axis=0),
    MAX=lambda values: np.max(values, axis=0),
)


def run(body: Callable[[Intracomm], object], ranks: int) -> None:
    """Call `body` on so many ranks.

    Raises:
        Exception: what the first rank that failed has raised.
    """
    room, problems = _Room(ranks), []

    def rank_body(rank: int) -> None:
        try:
            body(Intracomm(room, rank))
        except BaseException as problem:  # raised again below
            problems.append(problem)
            room.barrier.abort()

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        if not isinstance(problem, threading.BrokenBarrierError):
            raise problem
    assert not problems
