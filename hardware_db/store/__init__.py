"""The benchmark database: `open_store()` and the contract it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hardware_db.errors import DsplanError
from hardware_db.files import database_address, database_name, database_path
from hardware_db.measurement import Record
from hardware_db.notices import notice
from hardware_db.store.contract import Store
from hardware_db.store.memory import MemoryStore
from hardware_db.store.reports import Origin

__all__ = ["MemoryStore", "Origin", "Store", "add_or_keep", "ask_store", "open_own_store", "open_store"]

Answer = TypeVar("Answer")

_reported: set[str] = set()


def open_store(path: str | Path | None = None, *, thorough: bool = False) -> Store:
    """Return the store in the file at `path`; without one the database of `DSPLAN_DATABASE`, or the user's own file.

    Made where missing, upgraded where old, only to be read where the disk or a role allows no more. `thorough` looks
    for damage in a whole file, however large.

    Raises:
        DsplanError: the file cannot be opened or written, is no dsplan database, or comes from a newer dsplan; the
            server cannot be reached or refuses.
    """
    if path is None and (address := database_address()):
        from hardware_db.store.postgres import PostgresStore

        return PostgresStore(address)
    # Imported here: most commands never open the database, and sqlite3 costs milliseconds of their start.
    from hardware_db.store.sqlite import SqliteStore

    return SqliteStore(database_path() if path is None else Path(path), thorough=thorough)


def open_own_store() -> Store:
    """Return the store in this user's own file, whatever server `DSPLAN_DATABASE` names.

    Raises:
        BrokenFile: as `open_store`.
    """
    return open_store(database_path())


def add_or_keep(*records: Record) -> str:
    """Store the records and return where they are.

    Where a shared database cannot be used they are kept in this user's own file, and the answer says how they get
    there later.

    Raises:
        DsplanError: no database can be written.
    """
    try:
        with open_store() as store:
            store.add(*records)
        return database_name()
    except DsplanError as problem:
        if database_address() is None:
            raise
        with open_own_store() as store:
            store.add(*records)
        return f"{database_path()}, to be sent with `dsplan db push` ({' '.join(str(problem).split())})"


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
