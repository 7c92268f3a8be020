"""A damaged database is set aside, and a new one is made of every record that can still be read."""

from __future__ import annotations

import glob
import os
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hardware_db.errors import BrokenFile
from hardware_db.files import HOME
from hardware_db.measurement import RecordError
from hardware_db.store import rows
from hardware_db.store.connection import clear_errors, is_read_only, open_untrusting
from hardware_db.store.migrations import APPLICATION_ID, migrate
from hardware_db.store.pages import MAGIC, Found, Record, read_pages

_LOCK_SECONDS = 120.0
_LOGS = ("-wal", "-shm", "-journal")
_ID = re.compile(r"[0-9a-f]{32}")
_COPY_REMEDY = f"copy it to a directory that you can write to, and set {HOME} to that"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """How the records of a table are told from others: by how many values they have (fewer before a migration added
    columns) and which of them is a JSON object."""

    name: str
    fewest: int
    most: int
    json: int | None

    def holds(self, record: Record) -> bool:
        if not self.fewest <= len(record) <= self.most or not isinstance(record[0], str):
            return False
        document = "{" if self.json is None else record[self.json]
        return isinstance(document, str) and document.startswith("{")


# No two of these overlap in their number of values; SQLite's own table of the schema has five.
_TABLES = (
    _Table(name="fingerprints", fewest=3, most=3, json=1),
    _Table(name="traces", fewest=4, most=4, json=3),
    _Table(name="calibrations", fewest=7, most=7, json=6),
    _Table(name="rates", fewest=10, most=13, json=None),
    _Table(name="measurements", fewest=20, most=24, json=8),
)
_READERS = {
    "measurements": (rows.SELECT_MEASUREMENTS, rows.measurement),
    "rates": (rows.SELECT_RATES, rows.rate),
    "traces": (rows.SELECT_TRACES, rows.trace),
    "calibrations": (rows.SELECT_CALIBRATIONS, rows.calibration),
}


def repair(path: Path, opened: int | None = None) -> bool:
    """Replaces the damaged database at `path` and says so in one line; False where it is no database of dsplan's.

    `opened` is the inode that was found damaged: where another process has replaced it meanwhile, nothing is done.

    Raises:
        BrokenFile: there is no room for a new file, or no right to make one; the damaged one is as it was.
    """
    if is_read_only(path):
        raise BrokenFile(path, "the database is damaged, and cannot be set aside on a read-only disk", _COPY_REMEDY)
    try:
        with _alone(path), clear_errors(path):
            if opened is not None and path.exists() and path.stat().st_ino != opened:
                return True
            database, log = _read(path), _read(path.with_name(path.name + "-wal"))
            found = read_pages(database, log)
            kept = [record for record in found.records if any(table.holds(record) for table in _TABLES)]
            if not kept and not _is_ours(database):
                return False
            with _new_file(path) as rebuilt:
                counts, unread = _rebuild(rebuilt, kept, found)
                aside = _set_aside(path)
                os.replace(rebuilt, path)
    except OSError as error:
        problem = f"the database is damaged, and cannot be set aside ({error.strerror})"
        raise BrokenFile(path, problem, _COPY_REMEDY) from error
    print(f"dsplan: {_report_line(path, aside, counts, unread)}", file=sys.stderr)
    return True


def _is_ours(database: bytes) -> bool:
    """Whether a file without a single record is to be replaced: dsplan's by its header, as far as that goes, or nothing
    but zeros, which is what a crash of the machine leaves."""
    ours = database.startswith(MAGIC) and APPLICATION_ID.to_bytes(4, "big").startswith(database[68:72])
    return ours or (len(database) > 0 and not database.strip(b"\x00"))


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Where the new file is made: beside the damaged one, and gone again where it did not take its place. What a repair
    that was killed left there goes first."""
    rebuilt = path.with_name(f".{path.name}.rebuilt")

    def clear() -> None:
        for name in (rebuilt.name, f"{rebuilt.name}-journal"):
            rebuilt.with_name(name).unlink(missing_ok=True)

    clear()
    try:
        yield rebuilt
    finally:
        with suppress(OSError):
            clear()


def _rebuild(path: Path, records: Sequence[Record], found: Found) -> tuple[dict[str, int], int]:
    """A database of the records, at `path`: how many of each table are in it, and how many are known that are not."""
    connection = open_untrusting(path)
    try:
        migrate(connection, path)
        connection.execute("BEGIN")
        for table in _TABLES:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table.name})")]
            for record in records:
                if table.holds(record):
                    names = ", ".join(columns[: len(record)])
                    marks = ", ".join("?" * len(record))
                    with suppress(sqlite3.IntegrityError):  # a value that may not be missing is
                        connection.execute(f"INSERT OR IGNORE INTO {table.name} ({names}) VALUES ({marks})", record)
        for name in ("measurements", "rates"):
            unknown = f"SELECT DISTINCT fingerprint, '{rows.UNKNOWN}', '{rows.UNKNOWN}' FROM {name}"
            connection.execute(f"INSERT OR IGNORE INTO fingerprints {unknown}")
        counts = {name: _checked(connection, name) for name in _READERS}
        connection.execute("COMMIT")
        return counts, _unread(connection, found)
    finally:
        connection.close()


def _checked(connection: sqlite3.Connection, name: str) -> int:
    """How many records of a table can be read; the others are deleted."""
    select, read = _READERS[name]
    good = []
    for row in connection.execute(select).fetchall():
        with suppress(RecordError, ValueError, TypeError, KeyError, AttributeError):
            value = read(row)
            getattr(value, "document", None)
            good.append((row[0],))
    connection.execute("CREATE TEMP TABLE good (id TEXT PRIMARY KEY)")
    connection.executemany("INSERT OR IGNORE INTO good VALUES (?)", good)
    connection.execute(f"DELETE FROM {name} WHERE {_key(name)} NOT IN (SELECT id FROM good)")
    connection.execute("DROP TABLE good")
    return len(good)


def _unread(connection: sqlite3.Connection, found: Found) -> int:
    """How many records the indexes name that are not there any more: their first column is the id, the second the
    rowid. The index of the traces' series looks the same."""
    named = {key[0] for key in found.keys if len(key) == 2 and isinstance(key[0], str) and _ID.fullmatch(key[0])}
    known = {row[0] for name in _READERS for row in connection.execute(f"SELECT {_key(name)} FROM {name}")}
    series = {row[0] for row in connection.execute("SELECT series FROM traces")}
    return len(named - known - series)


def _key(name: str) -> str:
    return "key" if name == "traces" else "id"


def _set_aside(path: Path) -> Path:
    """Gives the damaged file a second name with the date, and its logs that name alone. Its own name stays until the
    new file takes it, so that nobody who opens it meanwhile starts an empty one."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    try:
        os.link(path, aside)
    except OSError:  # a file system without hard links
        shutil.copy2(path, aside)
    for log in _LOGS:
        with suppress(FileNotFoundError):
            os.replace(path.with_name(path.name + log), aside.with_name(aside.name + log))
    return aside


def set_aside_files(path: Path) -> tuple[Path, ...]:
    """The damaged files that were set aside for the database at `path`, oldest first."""
    found = path.parent.glob(f"{glob.escape(path.name)}.damaged-*")
    return tuple(sorted(file for file in found if not file.name.endswith(_LOGS)))


def _report_line(path: Path, aside: Path, counts: dict[str, int], unread: int) -> str:
    kept = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
    lost = f", {unread} more could not be read" if unread else ""
    return f"{path} was damaged: {kept} read and kept{lost}; the damaged file is {aside.name} beside it"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process repairs; the others wait. The lock is the operating system's, which releases it however its holder
    ends. Where there is none (Windows), two that repair at once both set the file aside.

    Raises:
        BrokenFile: another process has not come to an end for two minutes.
    """
    lock = path.with_name(f".{path.name}.repair")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with lock.open("w", encoding="utf-8") as file:
            if _locked(file) and _is_at(file, lock):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        lock.unlink()
                return
        if time.monotonic() > deadline:
            raise BrokenFile(path, "another process is still repairing the database", "end it and try again")
        time.sleep(0.02)


def _locked(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the file that was locked is still the one of this name: whoever held it before has removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
