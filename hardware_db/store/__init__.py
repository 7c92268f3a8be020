"""The benchmark database: `open_store()` and the contract it keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.paths import database_path
from hardware_db.store.contract import Store
from hardware_db.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "ask_store", "open_store"]

Answer = TypeVar("Answer")

_reported: set[str] = set()


def open_store(path: str | Path | None = None, *, thorough: bool = False) -> Store:
    """The store in the file at `path`, by default the user's; made where missing, upgraded where old, only to be read
    where the disk allows no more. `thorough` looks for damage in the whole file, however large.

    Raises:
        BrokenFile: the file cannot be opened or written, is no dsplan database, or comes from a newer dsplan.
    """
    # Imported here: most commands never open the database, and sqlite3 costs milliseconds of their start.
    from hardware_db.store.sqlite import SqliteStore

    return SqliteStore(database_path() if path is None else Path(path), thorough=thorough)


def ask_store(question: Callable[[Store], Answer], without: Answer, *, make: bool = False) -> Answer:
    """What the user's database answers, for work that goes on where there is none: `without` then, and where it cannot
    be used, which one line on standard error says, once in a process.

    A database that is not there is made with `make` alone; else this costs one look at the disk.
    """
    if not make and not _is_there(database_path()):
        return without
    try:
        with open_store() as store:
            return question(store)
    except BrokenFile as problem:
        line = " ".join(str(problem).split())
        if line not in _reported:
            _reported.add(line)
            print(f"dsplan: going on without the database: {line}", file=sys.stderr, flush=True)
        return without


def _is_there(path: Path) -> bool:
    """Whether anything has the name; also where it cannot be looked at, or is a link that leads nowhere."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True
