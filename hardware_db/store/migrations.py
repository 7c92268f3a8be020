"""Migrations of the database: append-only functions, each in its own transaction, counted in `PRAGMA user_version`.

A released migration is never edited; a change of schema is the next function, and a database file of the schema before
it goes to `tests/hardware_db/store/schemas/`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from hardware_db.errors import BrokenFile
from hardware_db.files import HOME

if TYPE_CHECKING:
    import sqlite3

Migration: TypeAlias = "Callable[[sqlite3.Connection], None]"

APPLICATION_ID = 0x6473706C
"""`dspl` in ASCII, in the header of every dsplan database, so that no other program's file is mistaken for one."""
_MADE_BY_ANALYZE = (("table", "sqlite_stat1"), ("table", "sqlite_stat4"))


def m001_measurements(connection: sqlite3.Connection) -> None:
    """Create the tables of measurements, fingerprints and rates."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(
        """CREATE TABLE fingerprints (
            key TEXT PRIMARY KEY,
            machine TEXT NOT NULL,
            versions TEXT NOT NULL
        )"""
    )
    connection.execute(
        """CREATE TABLE measurements (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            outcome TEXT NOT NULL,
            source TEXT NOT NULL,
            fingerprint TEXT NOT NULL REFERENCES fingerprints (key),
            model TEXT NOT NULL COLLATE NOCASE,
            strategy TEXT NOT NULL,
            plan_key TEXT NOT NULL,
            plan TEXT NOT NULL,
            peak_allocated_bytes INTEGER,
            peak_reserved_bytes INTEGER,
            device_used_bytes INTEGER,
            host_bytes INTEGER,
            step_seconds REAL,
            tokens_per_second REAL,
            first_loss REAL,
            last_loss REAL,
            steps INTEGER NOT NULL,
            predicted_peak_allocated_bytes INTEGER,
            predicted_step_seconds REAL
        )"""
    )
    connection.execute("CREATE INDEX measurements_by_time ON measurements (created_at)")
    connection.execute("CREATE INDEX measurements_by_plan ON measurements (plan_key, fingerprint)")
    connection.execute(
        """CREATE TABLE rates (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            source TEXT NOT NULL,
            fingerprint TEXT NOT NULL REFERENCES fingerprints (key),
            operation TEXT NOT NULL,
            dtype TEXT NOT NULL,
            size INTEGER,
            ranks INTEGER NOT NULL,
            value REAL NOT NULL,
            unit TEXT NOT NULL
        )"""
    )
    connection.execute("CREATE INDEX rates_by_fingerprint ON rates (fingerprint)")


def m002_traces(connection: sqlite3.Connection) -> None:
    """Add the table of traces."""
    connection.execute(
        """CREATE TABLE traces (
            key TEXT PRIMARY KEY,
            series TEXT NOT NULL,
            created_at TEXT NOT NULL,
            document TEXT NOT NULL
        )"""
    )
    connection.execute("CREATE INDEX traces_by_series ON traces (series)")


def m003_calibrations(connection: sqlite3.Connection) -> None:
    """Add the table of calibrations, and the shapes of rates."""
    connection.execute("ALTER TABLE rates ADD COLUMN shape TEXT NOT NULL DEFAULT ''")
    connection.execute("ALTER TABLE rates ADD COLUMN spread REAL")
    connection.execute("ALTER TABLE rates ADD COLUMN repeats INTEGER NOT NULL DEFAULT 1")
    for column in ("step_seconds_low", "step_seconds_high"):
        connection.execute(f"ALTER TABLE measurements ADD COLUMN {column} REAL")
        connection.execute(f"ALTER TABLE measurements ADD COLUMN predicted_{column} REAL")
    connection.execute(
        """CREATE TABLE calibrations (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            key TEXT NOT NULL,
            device TEXT NOT NULL,
            intra_link TEXT NOT NULL,
            inter_link TEXT NOT NULL,
            document TEXT NOT NULL
        )"""
    )
    connection.execute("CREATE INDEX calibrations_by_key ON calibrations (key, created_at)")


def m004_reports(connection: sqlite3.Connection) -> None:
    """Add the table of reports of runs."""
    connection.execute(
        """CREATE TABLE reports (
            id TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            origin_user TEXT NOT NULL,
            origin_host TEXT NOT NULL,
            state TEXT NOT NULL,
            outcome TEXT NOT NULL,
            model TEXT NOT NULL,
            strategy TEXT NOT NULL,
            backend TEXT NOT NULL,
            precision TEXT NOT NULL,
            device TEXT NOT NULL,
            ranks INTEGER NOT NULL,
            began REAL NOT NULL,
            held_seconds REAL NOT NULL,
            productive_seconds REAL NOT NULL,
            device_seconds REAL NOT NULL,
            usd_per_hour REAL,
            step INTEGER NOT NULL,
            steps INTEGER,
            loss REAL,
            step_seconds REAL,
            tokens_per_second REAL,
            peak_bytes INTEGER,
            restarts INTEGER NOT NULL,
            checkpoint_step INTEGER,
            checkpoint_age_seconds REAL,
            quiet_seconds REAL,
            alerts TEXT NOT NULL,
            heard_at REAL NOT NULL
        )"""
    )


MIGRATIONS: tuple[Migration, ...] = (m001_measurements, m002_traces, m003_calibrations, m004_reports)


def check_schema(connection: sqlite3.Connection, path: object) -> bool:
    """Refuse the database of another program before anything in it is run or changed.

    So is one into which somebody put triggers, views or tables of their own. `path` is named in the error. Return False
    where the database is dsplan's and does not hold what its version should, which is damage.

    Raises:
        BrokenFile: the database is neither empty nor dsplan's, holds what no migration made, or was written by a newer
            dsplan.
    """
    # One transaction, so that all answers describe one moment: another process may be making the tables just now.
    connection.execute("BEGIN")
    owner = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    objects = _objects(connection)
    connection.execute("COMMIT")
    if owner != APPLICATION_ID and (owner != 0 or objects):
        raise BrokenFile(
            path, "is the SQLite database of another program", f"move it away, or set {HOME} to another directory"
        )
    _refuse_newer(version, path, len(MIGRATIONS))
    schemas = _schemas()
    foreign = sorted(objects - set().union(*schemas))
    if foreign:
        kind, name, _ = foreign[0]
        raise BrokenFile(
            path,
            f"holds the {kind} {reprlib.repr(name)}, which dsplan did not make",
            "move it away, and ask whoever gave it to you for a `dsplan db export` of it",
        )
    return version >= 0 and objects == schemas[version]


@cache
def _schemas() -> tuple[frozenset[tuple[str, str, str]], ...]:
    """Return what a database of each version holds; that of version 0 is empty."""
    import sqlite3

    connection = sqlite3.connect(":memory:", isolation_level=None)
    versions = [frozenset(_objects(connection))]
    for migration in MIGRATIONS:
        migration(connection)
        versions.append(frozenset(_objects(connection)))
    connection.close()
    return tuple(versions)


def _objects(connection: sqlite3.Connection) -> set[tuple[str, str, str]]:
    """Kind, name and definition of all that was made in a database.

    What SQLite itself makes is left out: the indexes of its primary keys, which have no definition, and what ANALYZE
    found.
    """
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    return {(kind, name, " ".join(sql.split())) for kind, name, sql in rows if (kind, name) not in _MADE_BY_ANALYZE}


def migrate(connection: sqlite3.Connection, path: object, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Brings the database to the newest schema. `connection` is in autocommit mode; `path` is named in the error.

    Raises:
        BrokenFile: the file was written by a newer dsplan.
    """
    if _version(connection, path, len(migrations)) == len(migrations):
        return
    for number, migration in enumerate(migrations, start=1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Read under the lock: another process may have migrated while this one waited for it.
            if _version(connection, path, len(migrations)) < number:
                migration(connection)
                connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _version(connection: sqlite3.Connection, path: object, newest: int) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    _refuse_newer(version, path, newest)
    return version


def _refuse_newer(version: int, path: object, newest: int) -> None:
    if version > newest:
        raise BrokenFile(
            path,
            f"database schema {version} was written by a newer dsplan, this one knows up to {newest}",
            f"upgrade dsplan, or set {HOME} to another directory",
        )
