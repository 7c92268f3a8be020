"""The collectives of one communicator, timed, and the agreement of all ranks before any of them begins.

A collective that ranks enter with different arrays hangs or mixes up memory. So ranks first compare, in one message of
24 bytes, a digest of what each is about to send; what differs ends every rank with the same sentence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from strategies.errors import BackendMissing, CannotRun, DsplanError
from strategies.mpi.arrays import Array

if TYPE_CHECKING:
    from mpi4py import MPI

    from strategies.mpi.performance import PerformanceMonitor

Value = TypeVar("Value")


def mpi() -> Any:
    """mpi4py's MPI module; its import initializes MPI.

    Raises:
        BackendMissing: mpi4py, or the MPI library that it loads, is not installed.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError:
        raise BackendMissing("dsplan.mpi needs mpi4py; pip install 'dsplan[mpi]'") from None
    except (ImportError, RuntimeError) as problem:
        reason = str(problem).splitlines()[0]
        raise BackendMissing(f"mpi4py finds no MPI library ({reason}); install Open MPI or MPICH") from None
    return MPI


class Wire:
    """One communicator. `comm` None means all ranks; `monitor` gets the time of every collective, in seconds.

    Raises:
        BackendMissing: there is no MPI.
        CannotRun: `comm` is no communicator among these ranks.
    """

    def __init__(self, comm: MPI.Comm | None, monitor: PerformanceMonitor | None = None) -> None:
        self._mpi = mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise CannotRun(f"comm is {comm!r}; give MPI.COMM_WORLD or a communicator split from it")
        self.comm: MPI.Comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._monitor = monitor

    def agreed(self, action: str, describe: Callable[[], Value], words: Callable[[Value], Sequence[str]]) -> Value:
        """What `describe` returns, when its words are the same on all ranks.

        Raises:
            DsplanError: `describe` fails here or on another rank, or ranks disagree; all ranks raise.
        """
        value, same = self.compared(describe, words)
        if not same:
            raise self.disagreement(action, self.everyones(list(words(value))))
        return value

    def compared(self, describe: Callable[[], Value], words: Callable[[Value], Sequence[str]]) -> tuple[Value, bool]:
        """What `describe` returns, and whether its words are the same on all ranks.

        Raises:
            DsplanError: `describe` fails on another rank. What it raises here is raised here.
        """
        value: Value | None = None
        problem: Exception | None = None
        digest = 0
        try:
            value = describe()
            digest = _digest(words(value))
        except Exception as found:  # raised again below, when the others know
            problem = found
        # The largest, the negative of the smallest, and whether anyone has failed.
        message = np.array([digest, -digest, problem is not None], dtype=np.int64)
        self._timed("agree", lambda: self.comm.Allreduce(self._mpi.IN_PLACE, message, op=self._mpi.MAX))
        if message[2]:
            self._raise_one(problem)
        return value, bool(message[0] == -message[1])  # type: ignore[return-value]

    def settle(self, problem: DsplanError | None) -> None:
        """Return when all ranks came without a problem.

        Raises:
            DsplanError: this rank's problem, or that of the first rank that has one.
        """

        def own() -> None:
            if problem is not None:
                raise problem

        self.compared(own, lambda _: ())

    def everyones(self, value: Value) -> list[Value]:
        """Each rank's value, which is small and travels as a pickle."""
        values: list[Value] = self._timed("exchange", lambda: self.comm.allgather(value))
        return values

    def gathered_at(self, root: int, value: Value) -> list[Value] | None:
        """Each rank's value on `root`, None elsewhere."""
        values: list[Value] | None = self._timed("exchange", lambda: self.comm.gather(value, root=root))
        return values

    def told_by(self, root: int, value: Value | None) -> Value:
        """The value of `root`."""
        told: Value = self._timed("exchange", lambda: self.comm.bcast(value, root=root))
        return told

    def disagreement(self, action: str, words: Sequence[Sequence[str]]) -> CannotRun:
        """The first difference between ranks' words, in one line."""
        rank = next(rank for rank, other in enumerate(words) if list(other) != list(words[0]))
        other = words[rank]
        first = [word for word in words[0] if word not in set(other)]
        second = [word for word in other if word not in set(words[0])]
        return CannotRun(
            f"{action}: ranks differ: rank 0 has {first[0] if first else 'nothing more'}, rank {rank} has"
            f" {second[0] if second else 'nothing more'}; give every rank the same names, shapes and dtypes"
        )

    def sum(self, buffer: Array) -> None:
        """All-reduce in place."""
        self._timed("all-reduce", lambda: self.comm.Allreduce(self._mpi.IN_PLACE, buffer, op=self._mpi.SUM))

    def sum_parts(self, buffer: Array, counts: Sequence[int]) -> Array:
        """Reduce-scatter: `buffer` holds `counts[r]` elements for every rank r; the sum of this rank's is returned."""
        part = np.empty(counts[self.rank], dtype=buffer.dtype)
        self._timed("reduce-scatter", lambda: self.comm.Reduce_scatter(buffer, part, list(counts), op=self._mpi.SUM))
        return part

    def all_parts(self, part: Array, counts: Sequence[int]) -> Array:
        """All-gather: every rank's part, one after the other; `counts[r]` elements are rank r's."""
        whole = np.empty(sum(counts), dtype=part.dtype)
        kind, size = self._mpi.BYTE, part.dtype.itemsize
        sizes = [count * size for count in counts]
        self._timed(
            "all-gather",
            lambda: self.comm.Allgatherv([_bytes(part), sizes[self.rank], kind], [_bytes(whole), sizes, kind]),
        )
        return whole

    def parts_at(self, root: int, part: Array) -> Array | None:
        """Gather parts of one size on `root`: [ranks, elements] there, None elsewhere."""
        whole = np.empty((self.size, part.size), dtype=part.dtype) if self.rank == root else None
        into = None if whole is None else [_bytes(whole), self._mpi.BYTE]
        self._timed("gather", lambda: self.comm.Gather([_bytes(part), self._mpi.BYTE], into, root=root))
        return whole

    def copy_from(self, root: int, buffer: Array) -> None:
        """Broadcast in place."""
        self._timed("broadcast", lambda: self.comm.Bcast([_bytes(buffer), self._mpi.BYTE], root=root))

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        if self._monitor is None:
            return call()
        with self._monitor.timer(name, "communication"):
            return call()

    def _raise_one(self, problem: Exception | None) -> None:
        expected = problem is None or isinstance(problem, DsplanError)
        everyones = self.everyones(problem if expected else CannotRun(f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        rank, found = next((rank, one) for rank, one in enumerate(everyones) if one is not None)
        found.args = (f"rank {rank}: {found}",)
        raise found


def _digest(words: Sequence[str]) -> int:
    """A number of 62 bits, so that it and its negative fit a signed 64-bit integer."""
    text = "\n".join(words).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2


def _bytes(array: Array) -> Array:
    """A contiguous array's bytes, so that dtypes that MPI has not travel too."""
    return array.reshape(-1).view(np.uint8)
