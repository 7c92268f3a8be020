"""Connections to the database file, and its failures in the words of a person."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hardware_db.errors import BrokenFile
from hardware_db.files import HOME
from hardware_db.store.migrations import MIGRATIONS, check_schema, migrate
from hardware_db.units import format_seconds

BUSY_SECONDS = 60.0
_CHECKED_BYTES = 1 << 20
"""A file of this size is checked in 2 ms; larger ones are repaired where damage shows."""

# Write-ahead logging keeps its index in memory shared by the processes of one host, so on a file system that several
# hosts mount it would corrupt the file (sqlite.org/wal.html, "Overview", point 3); these get the rollback journal.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "9p",
        "ceph",
        "fuse.ceph",
        "glusterfs",
        "fuse.glusterfs",
        "fuse.sshfs",
    }
    | {"lustre", "gpfs", "beegfs", "panfs", "wekafs"}
)

_HOME_REMEDY = f"set {HOME} to a directory you can write to"
_BROKEN_REMEDY = "move it away and dsplan starts a new one; `dsplan db import` brings exports and run directories back"
# What sqlite says -> what is wrong, what to do. The error codes that would be the better key came with Python 3.11.
_DAMAGE = {
    "file is not a database": ("is not a SQLite database", _BROKEN_REMEDY),
    "malformed": ("the database is damaged", _BROKEN_REMEDY),
    "disk image": ("the database is damaged", _BROKEN_REMEDY),
    "could not decode": ("the database is damaged", _BROKEN_REMEDY),
    "unsupported file format": ("the database is damaged", _BROKEN_REMEDY),
    "no such table": ("the database lacks a table", _BROKEN_REMEDY),
    "no such column": ("the database lacks a column", _BROKEN_REMEDY),
}
_FAILURES = {
    "unable to open": ("cannot be opened", _HOME_REMEDY),
    "readonly database": ("the database is read-only", _HOME_REMEDY),
    "disk is full": ("the disk is full", f"free some space, or {_HOME_REMEDY}"),
    "disk i/o": ("the disk could not be read or written", f"check the disk and its quota, or {_HOME_REMEDY}"),
    "is locked": (
        f"other processes kept the database locked for {format_seconds(BUSY_SECONDS)}",
        "end the one that hangs and try again",
    ),
}


class DamagedFile(BrokenFile):
    """A database that cannot be read, of which something may be saved."""

    @classmethod
    def record(cls, path: Path) -> DamagedFile:
        """For a row that SQLite reads and that is no record."""
        return cls(path, "the database is damaged", _BROKEN_REMEDY)


def connect(path: Path, *, thorough: bool = False) -> sqlite3.Connection:
    """Open the database in autocommit mode at the newest schema, making directory and file where they are missing.

    Only to be read where the disk or its permissions allow no more. `thorough` checks every page and index, however
    many there are.

    Raises:
        DamagedFile: it is dsplan's, and something is not where it should be.
        BrokenFile: the file cannot be opened or written, is no dsplan database, or comes from a newer dsplan.
    """
    _check_file(path)
    if is_read_only(path):
        return _connect_read_only(path, thorough)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BrokenFile(path.parent, f"cannot be created ({error.strerror})", _HOME_REMEDY) from error
    with clear_errors(path):
        connection = open_untrusting(path)
        try:
            if not check_schema(connection, path):
                raise DamagedFile.record(path)
            connection.execute("PRAGMA foreign_keys = ON")
            _set_journal(connection, "delete" if _file_system(path) in NETWORK_FILE_SYSTEMS else "wal")
            migrate(connection, path)
            _check(connection, path, thorough)
        except BaseException:
            connection.close()
            raise
    return connection


def open_untrusting(database: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """Open a connection in autocommit mode that a file's own schema cannot use for harm.

    Nothing that it defines may call functions with effects or change the schema.
    """
    connection = sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None, uri=uri)
    connection.execute("PRAGMA trusted_schema = OFF")
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    return connection


def is_read_only(path: Path) -> bool:
    """Return whether the database can only be read: a change needs its directory too, where the logs lie."""
    return path.exists() and not all(os.access(target, os.W_OK) for target in (path, path.resolve().parent))


def _check_file(path: Path) -> None:
    """Refuses what SQLite would answer with a riddle, or would wait for.

    Raises:
        BrokenFile: it is no regular file, or cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BrokenFile(path, f"cannot be opened ({error.strerror})", _HOME_REMEDY) from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise BrokenFile(path, f"is {kind}, not a database", f"move it away, or set {HOME} to another directory")


def _connect_read_only(path: Path, thorough: bool) -> sqlite3.Connection:
    """Return a connection that writes nothing. An older schema is upgraded in a copy in memory."""
    with clear_errors(path):
        connection = _open_read_only(path)
        try:
            if not check_schema(connection, path):
                raise DamagedFile.record(path)
            _check(connection, path, thorough)
            if connection.execute("PRAGMA user_version").fetchone()[0] < len(MIGRATIONS):
                connection = _copy_in_memory(connection)
                migrate(connection, path)
            connection.execute("PRAGMA query_only = ON")
        except BaseException:
            connection.close()
            raise
    return connection


def _open_read_only(path: Path) -> sqlite3.Connection:
    """Open a database of a directory that cannot be written.

    Without the files of the write-ahead log, which cannot be made there, SQLite opens only what it is promised that
    nobody changes. A log that holds transactions is read in a copy.
    """
    address = path.resolve().as_uri()  # with every character escaped that means something in an address
    connection = open_untrusting(f"{address}?mode=ro", uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError:
        connection.close()
    log = Path(f"{path.resolve()}-wal")
    if not log.exists() or not log.stat().st_size:
        return open_untrusting(f"{address}?mode=ro&immutable=1", uri=True)
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="dsplan-") as directory:
            for file in (path, log):
                shutil.copyfile(file, Path(directory, "copy.db" if file is path else "copy.db-wal"))
            return _copy_in_memory(open_untrusting(Path(directory, "copy.db")))
    except OSError as error:
        raise BrokenFile(path, f"cannot be copied to be read ({error.strerror})", _HOME_REMEDY) from error


def _copy_in_memory(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Return the database of a connection in memory; the connection is closed."""
    copy = open_untrusting(":memory:")
    try:
        connection.backup(copy)
    except BaseException:
        copy.close()
        raise
    finally:
        connection.close()
    return copy


def _check(connection: sqlite3.Connection, path: Path, thorough: bool) -> None:
    """Walk all pages of a database that is small enough for that not to be felt.

    SQLite reports only what it trips over, and leaves rows out of an answer whose pages are not where they should be.

    Raises:
        DamagedFile: something is not where it should be.
    """
    if not thorough and path.stat().st_size > _CHECKED_BYTES:
        return
    check = "integrity_check(1)" if thorough else "quick_check(1)"
    if connection.execute(f"PRAGMA {check}").fetchone()[0] != "ok":
        raise DamagedFile.record(path)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One write transaction, which takes the write lock at once: a lock taken later cannot be waited for."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk makes sqlite roll back by itself.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turn sqlite's expected failures into one line that names the file and the remedy; the others pass.

    Raises:
        DamagedFile: what is in the file is at fault.
        BrokenFile: the file, the disk or its permissions are at fault.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        message = str(error).lower()
        for words, (problem, remedy) in _DAMAGE.items():
            if words in message:
                raise DamagedFile(path, problem, remedy) from error
        for words, (problem, remedy) in _FAILURES.items():
            if words in message:
                raise BrokenFile(path, problem, remedy) from error
        raise
    except UnicodeDecodeError as error:  # the schema's own text, which SQLite hands on as it stands
        raise DamagedFile.record(path) from error


def _set_journal(connection: sqlite3.Connection, mode: str) -> None:
    """Change the journal mode. Sqlite does not wait for the lock this needs, so processes that start at once retry."""
    deadline = time.monotonic() + BUSY_SECONDS
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != mode:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            if "is locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that holds `path`, empty where the platform has no list of mounts."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    held_by = {path.resolve(), *path.resolve().parents}
    mounted = (line.split()[1:3] for line in lines if len(line.split()) > 2)
    matches = [(len(point), kind) for point, kind in mounted if Path(point.replace("\\040", " ")) in held_by]
    # Of two mounts on one point the later hides the earlier.
    return max(enumerate(matches), key=lambda match: (match[1][0], match[0]))[1][1] if matches else ""
