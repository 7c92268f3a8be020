"""Persistent ranks: processes started once, joined in one process group, and handed one function after another.

Starting ranks costs seconds (each imports torch); handing a function to ranks that already wait costs milliseconds.
Tests of distributed code and the benchmarks of collectives run on such a pool:

    with RankPool(2) as pool:
        sums = pool.run(module.add_up, 3)      # [result of rank 0, result of rank 1]

The function and its arguments travel by pickle, so the function must be importable by name. When a rank raises, dies
or is late, every rank of the pool is ended and the next `run` starts fresh ones: ranks that may hang in a collective
are never used again.

Several pools start sooner with `preload`: one process imports these modules once, and ranks are forked from it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from hardware_db.units import format_seconds

_GRACE_SECONDS = 2.0
_START_SECONDS = 120.0
_FREE_GROUPS = b""


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; `reports` maps ranks to their tracebacks, first failure first."""

    def __init__(self, summary: str, reports: Mapping[int, str]) -> None:
        details = "".join(f"\n--- rank {rank} ---\n{text.rstrip()}" for rank, text in reports.items())
        super().__init__(summary + details)
        self.reports = dict(reports)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Settings of a pool's ranks.

    The collective library, variables set before anything is imported that is not preloaded, seconds one call may take,
    modules that are imported once for all ranks.
    """

    world_size: int
    backend: str = "gloo"
    timeout_seconds: float = 120.0
    variables: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise DsplanError(f"a pool of {self.world_size} ranks cannot be started; ask for at least 1")


class RankPool:
    """`world_size` ranks in one process group, started at the first `run` and used again by the next."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        timeout_seconds: float = 120.0,
        variables: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._settings = PoolSettings(
            world_size=world_size,
            backend=backend,
            timeout_seconds=timeout_seconds,
            variables=dict(variables or {}),
            preload=tuple(preload),
        )
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks of the pool."""
        return self._settings.world_size

    @property
    def process_ids(self) -> list[int]:
        """Ids of the ranks that are up, in rank order; empty before the first `run` and after a failure."""
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on every rank and return what each returned, in rank order.

        Raises:
            RankError: a rank raised, died, or did not answer within the pool's `timeout_seconds`.
        """
        if not self._ranks:
            self._start()
        job = pickle.dumps((sys.path, _by_value(function, arguments)))
        for _, connection in self._ranks:
            connection.send_bytes(job)
        answers = self._collect(self._settings.timeout_seconds)
        for _, connection in self._ranks:
            with suppress(OSError):  # a rank that is gone is reported by the next call
                connection.send_bytes(_FREE_GROUPS)
        return answers

    def close(self) -> None:
        """End the ranks and remove their files. A closed pool starts again when it is used again."""
        for _, connection in self._ranks:
            connection.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self._destroy()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dsplan-ranks-")
        context = self._context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._settings, self._folder.name, theirs), name=f"rank{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        self._collect(_START_SECONDS)

    def _context(self) -> SpawnContext | ForkServerContext:
        if not self._settings.preload:
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(self._settings.preload))
        return context

    def _collect(self, timeout_seconds: float) -> list[Any]:
        """One answer of every rank; after a first failure the others get a moment to report theirs."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        # A late rank writes its own traceback at `timeout_seconds`, so the pool waits a little longer than that.
        deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for rank in [rank for connection, rank in waiting.items() if connection in ready]:
                del waiting[self._ranks[rank][1]]
                succeeded, answer = self._receive(rank)
                (results if succeeded else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if not failures and not waiting:
            return [results[rank] for rank in range(self.world_size)]
        raise self._failure(failures, sorted(waiting.values()), timeout_seconds)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, connection = self._ranks[rank]
        try:
            succeeded, answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process.join(_GRACE_SECONDS)
            return False, f"the process ended with status {process.exitcode}\n{self._log(rank)}"
        return succeeded, answer if succeeded else answer + self._log(rank)

    def _failure(self, failures: dict[int, str], late: list[int], timeout_seconds: float) -> RankError:
        reports = dict(failures)
        for rank in late:
            stack = self._read(f"stack{rank}")
            reports[rank] = (stack or "still running; no traceback was written\n") + self._log(rank)
        self._destroy()
        if not failures:
            return RankError(
                f"rank {late[0]} of {self.world_size} did not answer in {format_seconds(timeout_seconds)}", reports
            )
        first = next(iter(failures))
        lines = [line for line in failures[first].splitlines() if line.strip()]
        headline = next((line for line in lines if line[0] not in " T"), lines[0])
        return RankError(f"rank {first} of {self.world_size} failed: {headline}", reports)

    def _log(self, rank: int) -> str:
        printed = self._read(f"log{rank}")
        return f"printed by rank {rank} (end):\n{printed[-4000:]}" if printed.strip() else ""

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name) if self._folder else Path(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _destroy(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _by_value(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return the call as bytes of its own: a rank can then report a function that it cannot import."""
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise DsplanError(f"{function.__qualname__} cannot be sent to ranks; define it at the top of a module")
    return pickle.dumps((function, arguments))


def _serve(rank: int, settings: PoolSettings, folder: str, connection: Connection) -> None:
    """Return the life of one rank: join the group, then answer calls until the pool closes the pipe."""
    _die_with_parent(folder)
    _write_output_to(Path(folder, f"log{rank}"))
    with open(Path(folder, f"stack{rank}"), "w") as stack:
        _answer(connection, partial(_join_group, rank, settings, folder))
        while True:
            try:
                job = connection.recv_bytes()
            except (EOFError, ConnectionError):
                break
            if job == _FREE_GROUPS:
                _free_groups()
                continue
            faulthandler.dump_traceback_later(settings.timeout_seconds, file=stack)
            _answer(connection, partial(_call, job))
            faulthandler.cancel_dump_traceback_later()
    # Leaving by the front door would wait in the destructors of groups whose other members are gone.
    os._exit(0)


def _answer(connection: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps((True, work()))
    except BaseException:
        # Whatever a test raises, SystemExit too, belongs to the caller; the rank itself stays to be told what is next.
        answer = pickle.dumps((False, _traceback_with_headline()))
    connection.send_bytes(answer)


def _traceback_with_headline() -> str:
    kind, value, _ = sys.exc_info()
    name = kind.__name__ if kind else "failure"
    return f"{name}: {str(value).splitlines()[0] if str(value) else ''}\n{traceback.format_exc()}"


def _call(job: bytes) -> Any:
    path, call = pickle.loads(job)
    sys.path[:] = path
    function, arguments = pickle.loads(call)
    _use_one_thread()
    return function(*arguments)


def _free_groups() -> None:
    """End the process groups that a call made, when no rank waits in one any more.

    For each of them gloo wakes a hundred times a second. DeepSpeed's stay, which it makes once for a process.
    """
    import torch.distributed as dist

    from strategies.torch_compat.distributed import forget_meshes, process_groups

    groups = [group for group in process_groups() if group is not dist.group.WORLD]
    if not groups or "deepspeed" in sys.modules:
        return
    while groups:
        dist.destroy_process_group(groups.pop(0))
    forget_meshes()
    gc.collect()


def _use_one_thread() -> None:
    """Undoes what accelerate and Lightning did in the call before, which take all cores where the variable is unset."""
    import torch

    torch.set_num_threads(1)


def _join_group(rank: int, settings: PoolSettings, folder: str) -> None:
    size = str(settings.world_size)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(settings.variables)
    import torch
    import torch.distributed as dist

    from strategies.torch_compat.distributed import FileStore

    _use_one_thread()
    if "nccl" in settings.backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        settings.backend,
        # torch takes a file:// address as it stands, quoted spaces and all.
        store=FileStore(str(Path(folder, "rendezvous")), settings.world_size),
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=max(settings.timeout_seconds, _START_SECONDS)),
    )
    dist.barrier()
    gc.freeze()  # what every rank imports: to look through it for garbage takes longer than a small test


def _die_with_parent(folder: str) -> None:
    """End this rank, and remove the pool's files, when the process that started the pool ends, however it ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _write_output_to(path: Path) -> None:
    """Send everything this process prints, C++ included, to a file the pool can quote."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
