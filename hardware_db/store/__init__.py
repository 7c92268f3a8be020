"""The benchmark database: `open_store()` and the contract it keeps."""

from __future__ import annotations

from pathlib import Path

from hardware_db.paths import database_path
from hardware_db.store.contract import Store
from hardware_db.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "open_store"]


def open_store(path: str | Path | None = None) -> Store:
    """The store in the file at `path`, by default the user's; made where missing, upgraded where old.

    Raises:
        BrokenFile: the file cannot be opened or written, is no dsplan database, or comes from a newer dsplan.
    """
    # Imported here: most commands never open the database, and sqlite3 costs milliseconds of their start.
    from hardware_db.store.sqlite import SqliteStore

    return SqliteStore(database_path() if path is None else Path(path))
