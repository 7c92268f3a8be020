"""A damaged database is set aside, and a new one is made of the rows that SQLite can still read."""

from __future__ import annotations

import glob
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from hardware_db.errors import BrokenFile
from hardware_db.files import HOME
from hardware_db.measurement import RecordError
from hardware_db.notices import notice
from hardware_db.store import rows
from hardware_db.store.connection import clear_errors, is_read_only, open_untrusting
from hardware_db.store.migrations import APPLICATION_ID, migrate

_LOCK_SECONDS = 120.0
_LOGS = ("-wal", "-shm", "-journal")
_MAGIC = b"SQLite format 3\x00"
_COPY_REMEDY = f"copy it to a directory that you can write to, and set {HOME} to that"


# In this order: measurements and rates name a fingerprint.
_TABLES = ("fingerprints", "traces", "calibrations", "rates", "measurements", "reports")
_UNREADABLE_IN_A_ROW = 10_000
"""A table is given up after this many rowids in a row that cannot be read: many times what a lost page holds."""
_READERS = {
    "measurements": (rows.SELECT_MEASUREMENTS, rows.measurement),
    "rates": (rows.SELECT_RATES, rows.rate),
    "traces": (rows.SELECT_TRACES, rows.trace),
    "calibrations": (rows.SELECT_CALIBRATIONS, rows.calibration),
    "reports": (rows.select_reports("0"), rows.report),
}


def repair(path: Path, opened: int | None = None) -> bool:
    """Replace the damaged database at `path` and say so in one line; False where it is no database of dsplan's.

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
            if not _is_ours(path):
                return False
            with _new_file(path) as rebuilt:
                counts = _rebuild(rebuilt, path)
                aside = _set_aside(path)
                os.replace(rebuilt, path)
    except OSError as error:
        problem = f"the database is damaged, and cannot be set aside ({error.strerror})"
        raise BrokenFile(path, problem, _COPY_REMEDY) from error
    notice(_report_line(path, aside, counts))
    return True


def _is_ours(path: Path) -> bool:
    """Return whether the file is dsplan's and to be replaced.

    Known by its header or, where that is gone, by the definition of a table, or nothing but zeros, which is what a
    crash of the machine leaves.
    """
    content = path.read_bytes()
    if content.startswith(_MAGIC):
        return APPLICATION_ID.to_bytes(4, "big").startswith(content[68:72])
    return len(content) > 0 and (b"CREATE TABLE measurements" in content or not content.strip(b"\x00"))


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Make the new file beside the damaged one; remove it where it did not take its place.

    What a repair that was killed left there goes first.
    """
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


def _rebuild(path: Path, damaged: Path) -> dict[str, int]:
    """Make a database at `path` of the rows of the damaged one that can be read; how many of each table it has."""
    with closing(open_untrusting(path)) as connection, _readable_copy(damaged) as source:
        migrate(connection, path)
        connection.execute("BEGIN")
        for table in _TABLES:
            column_names = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for row in _readable_rows(source, table):
                values = {name: value for name, value in row.items() if name in column_names}
                names, marks = ", ".join(values), ", ".join("?" * len(values))
                with suppress(sqlite3.IntegrityError):  # a value that may not be missing is
                    insert = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})"
                    connection.execute(insert, tuple(values.values()))
        for name in ("measurements", "rates"):
            unknown = f"SELECT DISTINCT fingerprint, '{rows.UNKNOWN}', '{rows.UNKNOWN}' FROM {name}"
            connection.execute(f"INSERT OR IGNORE INTO fingerprints {unknown}")
        counts = {name: _delete_unreadable(connection, name) for name in _READERS}
        connection.execute("COMMIT")
        return counts


@contextmanager
def _readable_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Return a copy of a damaged database in which SQLite reads what it can.

    It passes over definitions that make no sense and over a wrong size. Part of a page at the end goes, as SQLite would
    read zeros for the rest of it.
    """
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dsplan-") as directory:
        copy = Path(directory, "copy.db")
        shutil.copyfile(path, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(path.with_name(f"{path.name}-wal"), f"{copy}-wal")
        with copy.open("r+b") as file:
            page_size = int.from_bytes(file.read(18)[16:], "big")
            page_size = page_size if page_size > 1 else 65536
            os.truncate(copy, copy.stat().st_size // page_size * page_size)
        with closing(open_untrusting(copy)) as connection:
            if sys.version_info >= (3, 12):
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, False)  # which forbids the next line
            connection.execute("PRAGMA writable_schema = ON")
            yield connection


def _readable_rows(connection: sqlite3.Connection, table: str) -> Iterator[dict[str, object]]:
    """Return the rows of a table, each looked up by itself: behind rows that cannot be read come others that can."""
    query = f"SELECT rowid AS place, * FROM {table} WHERE rowid > ? ORDER BY rowid LIMIT 1"
    row_id, failures = 0, 0
    while failures < _UNREADABLE_IN_A_ROW:
        try:
            cursor = connection.execute(query, (row_id,))
            row = cursor.fetchone()
        except sqlite3.DatabaseError:
            row_id, failures = row_id + 1, failures + 1
            continue
        if row is None:
            return
        row_id, failures = max(row[0], row_id + 1), 0
        yield dict(zip((column[0] for column in cursor.description[1:]), row[1:], strict=True))


def _delete_unreadable(connection: sqlite3.Connection, name: str) -> int:
    """Delete the records of a table that cannot be read; return how many are left."""
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


def _key(name: str) -> str:
    return "key" if name == "traces" else "id"


def _set_aside(path: Path) -> Path:
    """Give the damaged file a second name with the date, and its logs that name alone.

    Its own name stays until the new file takes it, so that nobody who opens it meanwhile starts an empty one.
    """
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
    """Return the damaged files that were set aside for the database at `path`, oldest first."""
    files = path.parent.glob(f"{glob.escape(path.name)}.damaged-*")
    return tuple(sorted(file for file in files if not file.name.endswith(_LOGS)))


def _report_line(path: Path, aside: Path, counts: dict[str, int]) -> str:
    kept = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"
    return (
        f"{path} was damaged: {kept} read and kept; the damaged file is {aside.name} beside it;"
        " `dsplan db import RUN_DIRECTORY` brings back a run that is missing"
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process repairs; the others wait.

    The lock is the operating system's, which releases it however its holder ends. Where there is none (Windows), two
    that repair at once both set the file aside.

    Raises:
        BrokenFile: another process has not come to an end for two minutes.
    """
    lock = path.with_name(f".{path.name}.repair")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with lock.open("w", encoding="utf-8") as file:
            if _lock(file) and _is_at(file, lock):
                try:
                    yield
                finally:
                    with suppress(OSError):
                        lock.unlink()
                return
        if time.monotonic() > deadline:
            raise BrokenFile(path, "another process is still repairing the database", "end it and try again")
        time.sleep(0.02)


def _lock(file: IO[str]) -> bool:
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
    """Return whether the file that was locked is still the one of this name: whoever held it before has removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
