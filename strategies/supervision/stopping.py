"""Stopping on purpose: all ranks agree on a step, save, and end with status 75.

A collective at every step would cost every step. Instead the watchdog threads leave notes on the ranks' board. A rank
that gets a signal posts the request; every rank's thread that sees it *arms* its rank and says so; an armed rank reads
the board at each step's end. When all are armed, rank 0 names the next step. No rank can have ended that one, because
ending it takes rank 0's part of its collectives, which come later; and every rank looks before it continues.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hardware_db.files import replace_whole
from hardware_db.notices import notice
from strategies.distributed.consensus import objects_of_all, on_rank_zero
from strategies.distributed.environment import Environment
from strategies.run_directory.spec import STOPPED, EndingKind
from strategies.torch_compat.distributed import TCPStore

# The signals by which a rank is asked to save and stop.


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to stop: its kind, and until when (`time.monotonic`) the rank has time."""

    kind: EndingKind
    deadline: float


class StopSignal:
    """The request that this rank stop, by a signal or by a call; the first one counts."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self._grace_seconds = 0.0

    def listen(self, *, grace_seconds: float) -> None:
        """Note SIGUSR1, and SIGTERM unless the script has a handler or torch elastic ends ranks with it.

        Only a main thread can; elsewhere nothing is changed.
        """
        self._grace_seconds = grace_seconds
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGUSR1, self._note)
        if "TORCHELASTIC_RUN_ID" not in os.environ and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)

    def ask(self, kind: EndingKind, seconds: float | None = None) -> None:
        """Ask this rank to stop within `seconds`; None: what the options allow."""
        if self.request is None:
            left = self._grace_seconds if seconds is None else seconds
            self.request = Request(kind=kind, deadline=time.monotonic() + left)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask("preempted")


STOP_SIGNAL = StopSignal()


# A board on which the ranks of one attempt leave each other notes without a collective.
_FOLDER = "board"
_SECONDS = 5.0
"""How long the store of another node may take to answer; a rank 0 that is stopped never does."""


class Board(Protocol):
    """Notes by key. A board that cannot be reached behaves like an empty one."""

    def put(self, key: str, text: str) -> None:
        """Leave a note, or replace it."""
        ...

    def get(self, key: str) -> str | None:
        """Return a note, or None if there is none."""
        ...


class FileBoard:
    """Notes as files of a folder: for ranks of one node, which a stopped rank 0 cannot cut off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_failed = False

    def put(self, key: str, text: str) -> None:
        """Leave a note, or replace it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_whole(self._folder / key, text)
        except OSError as problem:
            if not self._has_failed:
                notice(f"{self._folder}: the ranks cannot leave each other notes ({problem.strerror})")
            self._has_failed = True

    def get(self, key: str) -> str | None:
        """Return a note, or None if there is none."""
        try:
            return (self._folder / key).read_text()
        except OSError:
            return None


class StoreBoard:
    """Notes in the store at which the ranks met, over a connection of its own: for ranks of several nodes."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        """Leave a note, or replace it."""
        with suppress(RuntimeError), self._lock:  # rank 0, when it ends, takes the store with it
            self._store.set(self._prefix + key, text)

    def get(self, key: str) -> str | None:
        """Return a note, or None if there is none."""
        with suppress(RuntimeError), self._lock:
            if self._store.check([self._prefix + key]):
                return str(self._store.get(self._prefix + key).decode())
        return None


def open_board(directory: Path, environment: Environment) -> Board:
    """Open the board of the ranks that are in the process group now; every rank calls it together.

    A folder of the run directory where all ranks are on one node, else the store.
    """
    token = on_rank_zero(lambda: _new_token(directory))
    if environment.spans_nodes:
        store = _connect()
        if all(objects_of_all(store is not None)):
            return StoreBoard(store, f"dsplan/board/{token}/")
    return FileBoard(directory / _FOLDER / token)


def _new_token(directory: Path) -> str:
    """Draw a name no earlier attempt has used; what those left is removed."""
    shutil.rmtree(directory / _FOLDER, ignore_errors=True)
    return uuid.uuid4().hex


def _connect() -> Any:
    """Return a connection of its own to the store at rank 0's address, or None if nothing answers there."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        return TCPStore(
            address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_SECONDS)
        )
    except (RuntimeError, ValueError, OSError):
        return None


_REQUEST, _STEP, _ARMED, _GONE = "stop", "stop-at", "armed", "gone"
_FAREWELL_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class Stopped(SystemExit):
    """Raised out of `engine.step()` where a rank saved and stops on purpose."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class Stopping:
    """One rank's part of the agreement: the watchdog thread calls `poll`, the main thread `is_at`."""

    def __init__(self, board: Board, rank: int, world_size: int) -> None:
        self._board, self._rank, self._world_size = board, rank, world_size
        self._armed: Request | None = None
        self._ready = False

    @property
    def request(self) -> Request | None:
        """The request, once this rank knows of it."""
        return self._armed or STOP_SIGNAL.request

    def poll(self) -> None:
        """Spread this rank's request to stop, and see that of others."""
        if self._armed is not None:
            return
        own, text = STOP_SIGNAL.request, self._board.get(_REQUEST)
        if text is None and own is not None:
            text = json.dumps({"kind": own.kind, "seconds": max(0.0, own.deadline - time.monotonic())})
            self._board.put(_REQUEST, text)
        if text is None:
            return
        request = json.loads(text)
        STOP_SIGNAL.ask(request["kind"], request["seconds"])
        deadline = time.monotonic() + request["seconds"] if own is None else own.deadline
        self._board.put(f"{_ARMED}-{self._rank}", "")
        self._armed = Request(kind=request["kind"], deadline=deadline)

    def is_at(self, step: int) -> bool:
        """Return whether this step, which has just ended, is the one after which all ranks stop."""
        if self._world_size == 1:
            return self.request is not None
        if self._armed is None:
            return False
        text = self._board.get(_STEP)
        if text is None and self._rank == 0 and self._all_armed():
            text = str(step + 1)
            self._board.put(_STEP, text)
        return text is not None and step >= int(text)

    def take_leave(self) -> None:
        """Wait a moment until all ranks are ready to end, because launchers kill the others when one has ended."""
        self._board.put(f"{_GONE}-{self._rank}", "")
        until = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < until and not self._all(_GONE):
            time.sleep(_LOOK_SECONDS)

    def _all_armed(self) -> bool:
        self._ready = self._ready or self._all(_ARMED)
        return self._ready

    def _all(self, key: str) -> bool:
        return all(self._board.get(f"{key}-{rank}") is not None for rank in range(self._world_size))
