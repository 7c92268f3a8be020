"""The database file: schemas, migrations, journals, and files that cannot be used."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from hardware_db.errors import BrokenFile
from hardware_db.store import connection as connections
from hardware_db.store import open_store
from hardware_db.store.migrations import APPLICATION_ID, MIGRATIONS, migrate
from hardware_db.store.sqlite import SqliteStore
from tests.hardware_db.store.records import (
    FROZEN,
    FROZEN_CALIBRATION,
    FROZEN_RATE,
    FROZEN_REPORT,
    FROZEN_RUN,
    FROZEN_TRACE,
    calibration,
    measurement,
    trace,
)

SCHEMAS = Path(__file__).parent / "schemas"


def test_every_schema_has_a_frozen_file() -> None:
    assert sorted(path.name for path in SCHEMAS.iterdir()) == [f"schema-{n}.db" for n in range(1, len(MIGRATIONS) + 1)]


@pytest.mark.parametrize("number", range(1, len(MIGRATIONS) + 1))
def test_a_database_of_every_schema_opens_with_its_records(tmp_path: Path, number: int) -> None:
    path = Path(shutil.copy(SCHEMAS / f"schema-{number}.db", tmp_path / "dsplan.db"))
    with open_store(path) as store:
        runs = (FROZEN[1], FROZEN[0]) if number < 3 else (FROZEN_RUN, FROZEN[1], FROZEN[0])
        assert store.list() == runs
        assert store.rates() == ((FROZEN[2],) if number < 3 else (FROZEN_RATE, FROZEN[2]))
        assert store.find(FROZEN[0].plan_key, FROZEN[0].fingerprint.key) == (FROZEN[0] if number < 3 else FROZEN_RUN)
        assert store.trace(FROZEN_TRACE.key) == (FROZEN_TRACE if number > 1 else None)
        assert store.calibrations() == ((FROZEN_CALIBRATION,) if number > 2 else ())
        assert store.reports() == ((FROZEN_REPORT,) if number > 3 else ())
        assert store.add(measurement(9)) == 1
        assert store.add_trace(trace(9))
        store.add_calibration(calibration(9))
    with open_store(path) as store:
        assert store.count() == len(runs) + 1
        assert store.calibration(calibration(9).hardware) == calibration(9)
        assert store.trace(trace(9).key) == trace(9)


def _add_note(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE measurements ADD COLUMN note TEXT")


def _fail_half_way(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE measurements ADD COLUMN half TEXT")
    raise RuntimeError("power cut")


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def _state(path: Path) -> tuple[int, set[str]]:
    connection = _open(path)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    columns = {row[1] for row in connection.execute("PRAGMA table_info(measurements)")}
    connection.close()
    return version, columns


def test_a_later_migration_upgrades_an_older_database_once(tmp_path: Path) -> None:
    path = Path(shutil.copy(SCHEMAS / "schema-1.db", tmp_path / "dsplan.db"))
    connection = _open(path)
    for _ in range(2):
        migrate(connection, path, [*MIGRATIONS[:1], _add_note])
    kept = connection.execute("SELECT count(*), count(note) FROM measurements").fetchone()
    connection.close()
    assert kept == (2, 0)
    version, columns = _state(path)
    assert version == 2
    assert "note" in columns


def test_a_migration_that_fails_leaves_the_schema_before_it(tmp_path: Path) -> None:
    path = Path(shutil.copy(SCHEMAS / "schema-1.db", tmp_path / "dsplan.db"))
    connection = _open(path)
    with pytest.raises(RuntimeError, match="power cut"):
        migrate(connection, path, [*MIGRATIONS[:1], _add_note, _fail_half_way])
    connection.close()
    version, columns = _state(path)
    assert version == 2
    assert "note" in columns
    assert "half" not in columns


def test_a_new_database_says_whose_it_is_and_writes_ahead(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "dsplan.db"
    open_store(path).close()
    connection = _open(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_network_file_system_gets_the_rollback_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dsplan.db"
    open_store(path).close()
    monkeypatch.setattr(connections, "_file_system", lambda path: "nfs4")
    with open_store(path) as store:
        store.add(measurement(1))
    connection = _open(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()


def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda / ext4 rw 0 0\nhome:/ /home nfs4 rw 0 0\n/dev/sdb /home/a\\040b xfs rw 0 0\n"
        "tmpfs /scratch tmpfs rw 0 0\nfs:/ /scratch lustre rw 0 0\nbroken\n"
    )
    expected = {
        "/etc/x": "ext4",
        "/home/me/x": "nfs4",
        "/home/a b/x": "xfs",
        "/homely/x": "ext4",
        "/scratch/x": "lustre",
    }
    assert {path: connections._file_system(Path(path), mounts) for path in expected} == expected
    assert connections._file_system(Path("/etc/x"), tmp_path / "missing") == ""


def _text(path: Path) -> None:
    path.write_text("these are notes, not a database; " * 100)


def _of_another_program(path: Path) -> None:
    connection = _open(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()


def _of_another_application_id(path: Path) -> None:
    connection = _open(path)
    connection.execute("PRAGMA application_id = 7")
    connection.close()


def _with(statement: str) -> Callable[[Path], None]:
    """A database of dsplan's in which somebody else did something."""

    def make(path: Path) -> None:
        open_store(path).close()
        connection = _open(path)
        connection.execute(statement)
        connection.close()

    return make


_newer = _with("PRAGMA user_version = 99")


def _under_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file where the directory should be")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_text, "dsplan.db: is not a SQLite database; move it away"),
        (Path.mkdir, "dsplan.db: is a directory, not a database; move it away"),
        (os.mkfifo, "dsplan.db: is no regular file, not a database; move it away"),
        (lambda path: path.symlink_to(path), "dsplan.db: cannot be opened (Too many levels of symbolic links)"),
        (
            _with("CREATE TRIGGER spy AFTER INSERT ON rates BEGIN DELETE FROM rates; END"),
            "holds the trigger 'spy', which",
        ),
        (
            _with("CREATE VIEW all_rates AS SELECT * FROM rates"),
            "holds the view 'all_rates', which dsplan did not make",
        ),
        (_with("CREATE TABLE notes (text TEXT)"), "holds the table 'notes', which dsplan did not make"),
        (_with("CREATE INDEX odd ON rates (abs(value))"), "holds the index 'odd', which dsplan did not make"),
        (
            _with("ALTER TABLE rates ADD COLUMN twice AS (value * 2)"),
            "holds the table 'rates', which dsplan did not make",
        ),
        (_of_another_program, "dsplan.db: is the SQLite database of another program; move it away"),
        (_of_another_application_id, "dsplan.db: is the SQLite database of another program; move it away"),
        (_newer, "schema 99 was written by a newer dsplan, this one knows up to 4; upgrade dsplan"),
        (_under_a_file, "home: cannot be created (File exists); set DSPLAN_HOME"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "home" / "dsplan.db"
    path.parent.mkdir()
    make(path)
    with pytest.raises(BrokenFile) as caught, open_store(path) as store:
        store.list()
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_database_of_another_program_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "dsplan.db"
    _of_another_program(path)
    before = path.read_bytes()
    with pytest.raises(BrokenFile):
        open_store(path)
    assert path.read_bytes() == before


def test_what_a_handed_over_database_brings_along_never_runs(tmp_path: Path) -> None:
    path = Path(shutil.copy(SCHEMAS / "schema-1.db", tmp_path / "dsplan.db"))
    _with_trigger = _open(path)
    _with_trigger.execute("CREATE TABLE spied (x)")
    _with_trigger.execute(
        "CREATE TRIGGER spy AFTER INSERT ON measurements BEGIN INSERT INTO spied VALUES (1); DELETE FROM rates; END"
    )
    _with_trigger.close()
    before = path.read_bytes()
    with pytest.raises(BrokenFile, match="which dsplan did not make"), open_store(path) as store:
        store.add(measurement(9))
    assert path.read_bytes() == before


def test_a_schema_may_not_call_functions_with_effects(tmp_path: Path) -> None:
    connection = connections.open_untrusting(tmp_path / "dsplan.db")
    assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 0", "PRAGMA user_version = -3", "DROP TABLE traces"])
def test_a_version_that_does_not_match_the_tables_is_damage_that_costs_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str
) -> None:
    path = tmp_path / "dsplan.db"
    with open_store(path) as store:
        store.add(measurement(1), measurement(2))
    _with(statement)(path)
    with open_store(path) as store:
        assert store.list() == (measurement(2), measurement(1))
        assert store.add_trace(trace(1))
    (line,) = capsys.readouterr().err.splitlines()
    assert "was damaged: 2 measurements read and kept; the damaged file is dsplan.db.damaged-" in line


def test_what_analyze_stores_is_no_stranger(tmp_path: Path) -> None:
    path = tmp_path / "dsplan.db"
    with open_store(path) as store:
        store.add(measurement(1))
    _with("ANALYZE")(path)
    assert open_store(path).count() == 1


@pytest.mark.parametrize("name", ["a b", "é?mode=ro&immutable=1#x%20", "file:x?mode=memory", "' OR 1"])
def test_a_path_is_a_path_whatever_it_spells(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name / "dsplan.db"
    with open_store(path) as store:
        store.add(measurement(1))
    assert path.stat().st_size > 0
    monkeypatch.setattr(connections, "is_read_only", lambda path: True)
    with open_store(path) as store:
        assert store.list() == (measurement(1),)


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "dsplan.db"
    path.touch()
    with open_store(path) as store:
        assert store.add(measurement(1)) == 1


def test_a_full_disk_is_one_line_and_leaves_no_half(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "dsplan.db") as store:
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(BrokenFile, match=r"dsplan\.db: the disk is full; free some space"):
            store.add(*(measurement(number) for number in range(1, 50)))
        assert store.count() == 0
        store._connection.execute("PRAGMA max_page_count = 1000")
        assert store.add(measurement(1)) == 1


def test_a_read_only_database_is_one_line(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "dsplan.db") as store:
        store._connection.execute("PRAGMA query_only = on")
        with pytest.raises(BrokenFile, match=r"dsplan\.db: the database is read-only; set DSPLAN_HOME"):
            store.add(measurement(1))
        assert store.list() == ()


def test_a_lock_that_stays_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dsplan.db"
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.1)
    with open_store(path) as store:
        other = _open(path)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BrokenFile, match=r"dsplan\.db: other processes kept the database locked"):
            store.add(measurement(1))
        other.execute("COMMIT")
        other.close()
        assert store.add(measurement(1)) == 1


def test_a_bug_in_a_query_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="syntax error"), connections.clear_errors(tmp_path):
        sqlite3.connect(":memory:").execute("SELEKT 1")
