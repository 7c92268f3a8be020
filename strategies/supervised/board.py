"""A board on which the ranks of one attempt leave each other notes without a collective.

Any thread of any rank may write and read at any time, also while the main threads are in a collective that never ends.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from strategies.agree import on_rank_zero
from strategies.environment import Environment

_FOLDER = "board"
_SECONDS = 5.0
"""How long the store of another node may take to answer; a rank 0 that is stopped never does."""


class Board(Protocol):
    """Notes by key. A board that cannot be reached behaves like an empty one."""

    def put(self, key: str, text: str) -> None:
        """Leave a note, or replace it."""
        ...

    def get(self, key: str) -> str | None:
        """A note; None where there is none."""
        ...


class FileBoard:
    """Notes as files of a folder: for ranks of one node, which a stopped rank 0 cannot cut off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        new = self._folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            new.write_text(text)
            os.replace(new, self._folder / key)

    def get(self, key: str) -> str | None:
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
        with suppress(RuntimeError), self._lock:
            self._store.set(self._prefix + key, text)

    def get(self, key: str) -> str | None:
        with suppress(RuntimeError), self._lock:
            if self._store.check([self._prefix + key]):
                return str(self._store.get(self._prefix + key).decode())
        return None


def open_board(directory: Path, environment: Environment) -> Board:
    """The board of the ranks that are in the process group now; every rank calls this together.

    A folder of the run directory where all ranks are on one node, else the store.
    """
    token = on_rank_zero(lambda: _new_token(directory))
    if environment.spans_nodes:
        store = _connected()
        if _all_have(store is not None, environment):
            return StoreBoard(store, f"dsplan/board/{token}/")
    return FileBoard(directory / _FOLDER / token)


def _new_token(directory: Path) -> str:
    """A name no earlier attempt has used; what those left is removed."""
    shutil.rmtree(directory / _FOLDER, ignore_errors=True)
    return uuid.uuid4().hex


def _connected() -> Any:
    """A connection of its own to the store at rank 0's address; None where nothing answers there."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        return TCPStore(
            address, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_SECONDS)
        )
    except (RuntimeError, ValueError, OSError):
        return None


def _all_have(own: bool, environment: Environment) -> bool:
    box: list[Any] = [None] * environment.world_size
    dist.all_gather_object(box, own)
    return all(box)
