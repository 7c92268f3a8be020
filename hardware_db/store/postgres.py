"""The store in a PostgreSQL database, which a team shares.

Ids are made where a record is, so that adding one twice is harmless: what a lost connection leaves open is added again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hardware_db.errors import DsplanError
from hardware_db.files import DATABASE, without_password
from hardware_db.measurement import (
    CalibrationRecord,
    HardwareKind,
    Measurement,
    Outcome,
    RateMeasurement,
    Record,
    RecordError,
    TraceRecord,
)
from hardware_db.store import rows
from hardware_db.store.contract import Store, single_match
from hardware_db.store.reports import Origin, StatusReport, own_origin
from hardware_db.units import format_seconds

if TYPE_CHECKING:
    import psycopg

Answer = TypeVar("Answer")

CONNECT_SECONDS = 5
"""How long a command waits for the server at the start; planning continues without it."""
LOST_SECONDS = 60.0
"""How long a store that was connected waits for a server that went away, such as one that is restarted."""
_PAUSE_SECONDS = 0.25
_PATIENCE = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Seconds, and milliseconds in the last: a server whose network is cut is noticed after half a minute (libpq)."""
_LOCK = 0x6473706C
"""The advisory lock under which one process at a time migrates: `dspl` in ASCII."""
_NEWEST_FIRST = "ORDER BY created_at DESC, id DESC"
_MADE_ON = "(fingerprint = %(fingerprint)s OR split_part(fingerprint, '-', 1) = %(fingerprint)s)"
_ORIGIN = ("origin_user", "origin_host")


def p001_tables(cursor: psycopg.Cursor[Any]) -> None:
    """Create all tables. Text is compared byte by byte, as SQLite does, whatever the server's locale."""
    cursor.execute(
        """CREATE TABLE fingerprints (
            key TEXT COLLATE "C" PRIMARY KEY,
            machine TEXT NOT NULL,
            versions TEXT NOT NULL
        )"""
    )
    cursor.execute(
        """CREATE TABLE measurements (
            id TEXT COLLATE "C" PRIMARY KEY,
            created_at TEXT COLLATE "C" NOT NULL,
            outcome TEXT NOT NULL,
            source TEXT NOT NULL,
            fingerprint TEXT COLLATE "C" NOT NULL REFERENCES fingerprints (key),
            model TEXT NOT NULL,
            strategy TEXT NOT NULL,
            parameters BIGINT,
            plan_key TEXT COLLATE "C" NOT NULL,
            plan TEXT NOT NULL,
            peak_allocated_bytes BIGINT,
            peak_reserved_bytes BIGINT,
            device_used_bytes BIGINT,
            host_bytes BIGINT,
            step_seconds DOUBLE PRECISION,
            step_seconds_low DOUBLE PRECISION,
            step_seconds_high DOUBLE PRECISION,
            tokens_per_second DOUBLE PRECISION,
            first_loss DOUBLE PRECISION,
            last_loss DOUBLE PRECISION,
            steps BIGINT NOT NULL,
            predicted_peak_allocated_bytes BIGINT,
            predicted_step_seconds DOUBLE PRECISION,
            predicted_step_seconds_low DOUBLE PRECISION,
            predicted_step_seconds_high DOUBLE PRECISION,
            origin_user TEXT NOT NULL,
            origin_host TEXT NOT NULL
        )"""
    )
    cursor.execute(
        """CREATE TABLE rates (
            id TEXT COLLATE "C" PRIMARY KEY,
            created_at TEXT COLLATE "C" NOT NULL,
            source TEXT NOT NULL,
            fingerprint TEXT COLLATE "C" NOT NULL REFERENCES fingerprints (key),
            operation TEXT NOT NULL,
            dtype TEXT NOT NULL,
            size BIGINT,
            ranks BIGINT NOT NULL,
            value DOUBLE PRECISION NOT NULL,
            unit TEXT NOT NULL,
            spread DOUBLE PRECISION,
            repeats BIGINT NOT NULL,
            shape TEXT NOT NULL,
            origin_user TEXT NOT NULL,
            origin_host TEXT NOT NULL
        )"""
    )
    cursor.execute(
        """CREATE TABLE traces (
            key TEXT COLLATE "C" PRIMARY KEY,
            series TEXT NOT NULL,
            created_at TEXT COLLATE "C" NOT NULL,
            document TEXT NOT NULL
        )"""
    )
    cursor.execute(
        """CREATE TABLE calibrations (
            id TEXT COLLATE "C" PRIMARY KEY,
            created_at TEXT COLLATE "C" NOT NULL,
            key TEXT NOT NULL,
            device TEXT NOT NULL,
            intra_link TEXT NOT NULL,
            inter_link TEXT NOT NULL,
            document TEXT NOT NULL
        )"""
    )
    for name, columns in {
        "measurements_by_time": "measurements (created_at DESC, id DESC)",
        "measurements_by_plan": "measurements (plan_key, created_at DESC, id DESC)",
        "measurements_by_machine": "measurements (split_part(fingerprint, '-', 1), created_at DESC, id DESC)",
        "measurements_by_size": "measurements (parameters, created_at DESC, id DESC)",
        "rates_by_machine": "rates (split_part(fingerprint, '-', 1))",
        "traces_by_series": "traces (series)",
        "calibrations_by_key": "calibrations (key, created_at)",
    }.items():
        cursor.execute(f"CREATE INDEX {name} ON {columns}".encode())


def p002_reports(cursor: psycopg.Cursor[Any]) -> None:
    """Add the table of reports of runs; `heard_at` is in seconds since 1970, by the server's clock.

    It changes with each report, so an index of it would grow with every one.
    """
    cursor.execute(
        """CREATE TABLE reports (
            id TEXT COLLATE "C" PRIMARY KEY,
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
            ranks BIGINT NOT NULL,
            began DOUBLE PRECISION NOT NULL,
            held_seconds DOUBLE PRECISION NOT NULL,
            productive_seconds DOUBLE PRECISION NOT NULL,
            device_seconds DOUBLE PRECISION NOT NULL,
            usd_per_hour DOUBLE PRECISION,
            step BIGINT NOT NULL,
            steps BIGINT,
            loss DOUBLE PRECISION,
            step_seconds DOUBLE PRECISION,
            tokens_per_second DOUBLE PRECISION,
            peak_bytes BIGINT,
            restarts BIGINT NOT NULL,
            checkpoint_step BIGINT,
            checkpoint_age_seconds DOUBLE PRECISION,
            quiet_seconds DOUBLE PRECISION,
            alerts TEXT NOT NULL,
            heard_at DOUBLE PRECISION NOT NULL
        )"""
    )


def p003_outcomes(cursor: psycopg.Cursor[Any]) -> None:
    """Order runs of one size by how they ended: those without memory are few, or none, among many that completed."""
    cursor.execute("DROP INDEX measurements_by_size")
    cursor.execute(
        "CREATE INDEX measurements_by_outcome ON measurements (parameters, outcome, created_at DESC, id DESC)"
    )


MIGRATIONS: tuple[Callable[[psycopg.Cursor[Any]], None], ...] = (p001_tables, p002_reports, p003_outcomes)
"""Append-only, as those of `hardware_db.store.migrations`; `dsplan_schema` holds how many have run."""


class PostgresStore(Store):
    """One connection to the database at a `postgresql://` address; see Store for what holds.

    A connection that is lost is made again, and what was asked is done again, for LOST_SECONDS. Every row says which
    user of which host added it. A role that may only read opens a database whose tables are there and up to date.
    `named_by` is the variable or the flag that gave the address, for errors.

    Raises:
        DsplanError: on opening, psycopg is missing, the server cannot be reached or refuses, or its schema is newer.
    """

    def __init__(self, address: str, named_by: str = DATABASE) -> None:
        self._address = address
        self._name = without_password(address)
        self._named_by = named_by
        self._instead = f", or unset {DATABASE} to use your own database" if named_by == DATABASE else ""
        self._psycopg = _psycopg(named_by)
        self._connection = self._connect()
        try:
            self._answered(self._migrate)
        except BaseException:
            self.close()
            raise

    def add(self, *records: Record) -> int:
        """Store the records in one transaction; return how many are new."""
        added_by = own_origin()
        origin = (added_by.user, added_by.host)
        # Rows are locked in the same order by everybody, so that no two transactions wait for each other.
        ordered = sorted(records, key=lambda record: (record.fingerprint.key, record.id))

        def work(cursor: psycopg.Cursor[Any]) -> int:
            added = 0
            for record in ordered:
                cursor.execute(_INSERT_FINGERPRINT, rows.fingerprint_row(record.fingerprint))
                if isinstance(record, Measurement):
                    cursor.execute(_INSERT_MEASUREMENT, (*rows.measurement_row(record), _parameters(record), *origin))
                else:
                    cursor.execute(_INSERT_RATE, (*rows.rate_row(record), *origin))
                added += cursor.rowcount
            return added

        return self._run(work)

    def get(self, id_prefix: str) -> Measurement:
        """Return the measurement whose id starts so."""
        # Ids are hexadecimal, so every id with this prefix sorts between the prefix and the prefix plus "g".
        values = {"prefix": id_prefix, "end": f"{id_prefix}g", "limit": 2}
        return single_match(id_prefix, self._measurements("WHERE id >= %(prefix)s AND id < %(end)s", values))

    def forget(self, id_prefix: str) -> Measurement:
        """Remove the measurement whose id starts so, and return it."""
        measurement = self.get(id_prefix)
        self._run(lambda cursor: cursor.execute("DELETE FROM measurements WHERE id = %s", (measurement.id,)))
        return measurement

    def list(
        self,
        *,
        model: str | None = None,
        strategy: str | None = None,
        fingerprint: str | None = None,
        outcome: Outcome | None = None,
        parameters: int | None = None,
        limit: int | None = None,
    ) -> tuple[Measurement, ...]:
        """Return the newest measurements that match every filter given."""
        conditions = {
            "lower(model) = lower(%(model)s)": model,
            "strategy = %(strategy)s": strategy,
            "outcome = %(outcome)s": outcome,
            "parameters = %(parameters)s": parameters,
            _MADE_ON: fingerprint,
        }
        given = [condition for condition, value in conditions.items() if value is not None]
        values = {"model": model, "strategy": strategy, "outcome": outcome, "parameters": parameters}
        condition = f"WHERE {' AND '.join(given)}" if given else ""
        return self._measurements(condition, {**values, "fingerprint": fingerprint, "limit": limit})

    def find(self, plan_key: str, fingerprint: str) -> Measurement | None:
        """Return the newest completed measurement of a plan on a machine, or None."""
        values = {"plan_key": plan_key, "fingerprint": fingerprint, "limit": 1}
        matches = self._measurements(f"WHERE plan_key = %(plan_key)s AND {_MADE_ON}", values)
        return matches[0] if matches else None

    def rates(self, fingerprint: str | None = None) -> tuple[RateMeasurement, ...]:
        """Return the rates measured there, or everywhere."""
        condition = "" if fingerprint is None else f"WHERE {_MADE_ON}"
        return self._query(f"{rows.SELECT_RATES} {condition} {_NEWEST_FIRST}", {"fingerprint": fingerprint}, rows.rate)

    def add_trace(self, trace: TraceRecord) -> bool:
        """Store a trace; return whether its key is new."""
        return self._insert(_INSERT_TRACE, rows.trace_row(trace))

    def trace(self, key: str) -> TraceRecord | None:
        """Return the trace with this key, or None."""
        matches = self._traces("key = %(value)s", key)
        return matches[0] if matches else None

    def traces(self, series: str) -> tuple[TraceRecord, ...]:
        """Return the traces of one series."""
        return self._traces("series = %(value)s", series)

    def add_calibration(self, calibration: CalibrationRecord) -> None:
        """Store a calibration, unless its id is there."""
        self._insert(_INSERT_CALIBRATION, rows.calibration_row(calibration))

    def calibration(self, hardware: HardwareKind) -> CalibrationRecord | None:
        """Return the newest calibration of this kind of hardware, or None."""
        matches = self._calibrations("WHERE key = %(key)s", {"key": hardware.key})
        return matches[0] if matches else None

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """Return all calibrations, newest first."""
        return self._calibrations("", {})

    def count(self) -> int:
        """Return how many measurements there are."""
        return int(self._run(lambda cursor: cursor.execute("SELECT count(*) FROM measurements").fetchall())[0][0])

    def report(self, status: StatusReport) -> None:
        """Put a report in the place of the run's last one."""
        self._run(lambda cursor: cursor.execute(_UPSERT_REPORT, rows.report_row(status)))

    def reports(self, limit: int | None = None) -> tuple[StatusReport, ...]:
        """Return the last reports of runs, the newest first."""
        return self._query(f"{_SELECT_REPORTS} LIMIT %(limit)s", {"limit": limit}, rows.report)

    def origin(self, id: str) -> Origin | None:
        """Return who added the measurement with this id, and where; None if there is none."""
        query = "SELECT origin_user, origin_host FROM measurements WHERE id = %s"
        matches = self._run(lambda cursor: cursor.execute(query, (id,)).fetchall())
        return Origin(user=matches[0][0], host=matches[0][1]) if matches else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _traces(self, condition: str, value: str) -> tuple[TraceRecord, ...]:
        query = f"{rows.SELECT_TRACES} WHERE {condition} ORDER BY created_at DESC, key DESC"
        return self._query(query, {"value": value}, rows.trace)

    def _calibrations(self, condition: str, values: Mapping[str, object]) -> tuple[CalibrationRecord, ...]:
        return self._query(f"{rows.SELECT_CALIBRATIONS} {condition} {_NEWEST_FIRST}", values, rows.calibration)

    def _measurements(self, condition: str, values: Mapping[str, object]) -> tuple[Measurement, ...]:
        # LIMIT NULL is none.
        query = f"{rows.SELECT_MEASUREMENTS} {condition} {_NEWEST_FIRST} LIMIT %(limit)s"
        return self._query(query, values, rows.measurement)

    def _insert(self, statement: str, row: Sequence[object]) -> bool:
        return self._run(lambda cursor: cursor.execute(statement.encode(), row).rowcount == 1)

    def _query(
        self, query: str, values: Mapping[str, object], read: Callable[[tuple[Any, ...]], Answer]
    ) -> tuple[Answer, ...]:
        fetched = self._run(lambda cursor: cursor.execute(query.encode(), values).fetchall())
        try:
            return tuple(read(row) for row in fetched)
        except (RecordError, ValueError, TypeError, KeyError, AttributeError) as error:
            remedy = "an administrator should look at it: dsplan wrote no such row"
            raise DsplanError(f"{self._name}: holds a row that is no record ({error}); {remedy}") from error

    def _run(self, work: Callable[[psycopg.Cursor[Any]], Answer]) -> Answer:
        """Do some work in a transaction, with a new connection where the one there is was lost."""
        until = None
        while True:
            try:
                if self._connection.closed:
                    self._connection = self._connect()
                return self._answered(work)
            except (_LostError, _UnreachableError) as lost:
                until = until or time.monotonic() + LOST_SECONDS
                if time.monotonic() > until:
                    raise DsplanError(f"{lost}; it did not come back for {format_seconds(LOST_SECONDS)}") from lost
                time.sleep(_PAUSE_SECONDS)

    def _answered(self, work: Callable[[psycopg.Cursor[Any]], Answer]) -> Answer:
        try:
            with self._connection.transaction(), self._connection.cursor() as cursor:
                return work(cursor)
        except self._psycopg.errors.InsufficientPrivilege as error:
            remedy = f"ask for a role that may{self._instead}"
            raise DsplanError(f"{self._name}: {_first_line(error)}; {remedy}") from error
        except self._psycopg.Error as error:
            # A server that ends its sessions says so before the connection is closed, and so does one that starts.
            is_lost = self._connection.closed or (error.sqlstate or "").startswith("57P0")
            if is_lost:
                self._connection.close()
            kind = _LostError if is_lost else DsplanError
            raise kind(f"{self._name}: {_first_line(error)}") from error

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection: psycopg.Connection[Any] = self._psycopg.connect(
                self._address, autocommit=True, application_name="dsplan", **_PATIENCE
            )
        except (self._psycopg.Error, UnicodeError) as error:
            remedy = f"start the server, or correct {self._named_by}"
            if self._named_by == DATABASE:
                remedy = f"start the server, correct {DATABASE}, or unset it to use your own database"
            raise _UnreachableError(f"{self._name}: {_first_line(error)}; {remedy}") from error
        return connection

    def _migrate(self, cursor: psycopg.Cursor[Any]) -> None:
        """Bring the database to the newest schema; other processes that do so wait for each other."""
        version = _version(cursor)
        if version < len(MIGRATIONS):
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            cursor.execute("CREATE TABLE IF NOT EXISTS dsplan_schema (version INTEGER NOT NULL)")
            version = _version(cursor)
            for migration in MIGRATIONS[version:]:
                migration(cursor)
            cursor.execute("DELETE FROM dsplan_schema")
            cursor.execute("INSERT INTO dsplan_schema VALUES (%s)", (max(version, len(MIGRATIONS)),))
        if version > len(MIGRATIONS):
            raise DsplanError(
                f"{self._name}: schema {version} was written by a newer dsplan, this one knows up to"
                f" {len(MIGRATIONS)}; upgrade dsplan{self._instead}"
            )


class _LostError(DsplanError):
    """The connection went away during some work."""


class _UnreachableError(DsplanError):
    """The server did not answer, or refused."""


def _insert(statement: str, *columns: str) -> str:
    """Return a statement of `rows` with psycopg's placeholders, and more columns at its end."""
    names, _, values = statement.partition(") VALUES (")
    more = "".join(f", {column}" for column in columns)
    return f"{names}{more}) VALUES ({values.replace('?', '%s').replace(')', ', %s' * len(columns) + ')', 1)}"


_INSERT_FINGERPRINT = _insert(rows.INSERT_FINGERPRINT).encode()
_INSERT_MEASUREMENT = _insert(rows.INSERT_MEASUREMENT, "parameters", *_ORIGIN).encode()
_INSERT_RATE = _insert(rows.INSERT_RATE, *_ORIGIN).encode()
_INSERT_TRACE = _insert(rows.INSERT_TRACE)
_INSERT_CALIBRATION = _insert(rows.INSERT_CALIBRATION)
# The time of the statement, and not that of a transaction's beginning.
_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
_UPSERT_REPORT = rows.upsert_report(_NOW).replace("?", "%s").encode()
_SELECT_REPORTS = f"{rows.select_reports(_NOW)} ORDER BY heard_at DESC, id DESC"


def _psycopg(named_by: str) -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise DsplanError(
            f"{named_by} names a PostgreSQL database, and psycopg is not installed; pip install 'dsplan[postgres]'"
        ) from error
    return psycopg


def _version(cursor: psycopg.Cursor[Any]) -> int:
    """Return how many migrations have run, 0 where there are no tables yet."""
    cursor.execute("SELECT to_regclass('dsplan_schema')")
    if cursor.fetchall()[0][0] is None:
        return 0
    return int(cursor.execute("SELECT coalesce(max(version), 0) FROM dsplan_schema").fetchall()[0][0])


def _parameters(record: Measurement) -> int | None:
    """Return the model's parameters as a column that SQL can select by."""
    return record.parameters if isinstance(record.parameters, int) else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(":")
