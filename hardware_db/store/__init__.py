"""The benchmark database: `open_store()` and the contract it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hardware_db.errors import DsplanError
from hardware_db.files import database_path
from hardware_db.notices import notice
from hardware_db.store.contract import Store
from hardware_db.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "ask_store", "open_store"]

Answer = TypeVar("Answer")

_reported: set[str] = set()


def open_store(path: str | Path | None = None, *, thorough: bool = False) -> Store:
    """Return the store in the file at `path`, by default the user's.

    Made where missing, upgraded where old, only to be read where the disk allows no more. `thorough` looks for damage
    in the whole file, however large.

    Raises:
        BrokenFile: the file cannot be opened or written, is no dsplan database, or comes from a newer dsplan.
    """
    # Imported here: most commands never open the database, and sqlite3 costs milliseconds of their start.
    from hardware_db.store.sqlite import SqliteStore

    return SqliteStore(database_path() if path is None else Path(path), thorough=thorough)


def ask_store(question: Callable[[Store], Answer], without: Answer) -> Answer:
    """Return what the user's database answers, for work that continues without.

    Where it cannot be used the answer is `without`, and one line on standard error says why, once in a process.
    """
    try:
        with open_store() as store:
            return question(store)
    except DsplanError as problem:
        line = " ".join(str(problem).split())
        if line not in _reported:
            _reported.add(line)
            notice(f"continuing without the database: {line}")
        return without
