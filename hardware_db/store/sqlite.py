"""The store in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from hardware_db.store.connection import DamagedFile, clear_errors, connect, transaction
from hardware_db.store.contract import Store, single_match
from hardware_db.store.reports import StatusReport

Answer = TypeVar("Answer")

_NEWEST_FIRST = "ORDER BY created_at DESC, id DESC"
_MADE_ON = "(fingerprint = :fingerprint OR substr(fingerprint, 1, instr(fingerprint, '-') - 1) = :fingerprint)"
_NOW = "((julianday('now') - 2440587.5) * 86400)"
_REPAIRS = 2


class SqliteStore(Store):
    """One connection to the file at `path`; see Store for what holds.

    A damaged file is repaired wherever it shows, and what was asked is done again with the new one. The same happens
    where another process has put a new file into the place of the one that is open. `thorough` looks for damage in the
    whole file, however large.

    Raises:
        BrokenFile: on opening, the file cannot be used; the message says why and what to do.
    """

    def __init__(self, path: Path, *, thorough: bool = False) -> None:
        self.path = path
        self._thorough = thorough
        self._connection = self._open()

    def add(self, *records: Record) -> int:
        """Store the records in one transaction; return how many are new."""

        def work(connection: sqlite3.Connection) -> int:
            added = 0
            with transaction(connection):
                for record in records:
                    connection.execute(rows.INSERT_FINGERPRINT, rows.fingerprint_row(record.fingerprint))
                    if isinstance(record, Measurement):
                        cursor = connection.execute(rows.INSERT_MEASUREMENT, rows.measurement_row(record))
                    else:
                        cursor = connection.execute(rows.INSERT_RATE, rows.rate_row(record))
                    added += cursor.rowcount
            return added

        return self._run(work)

    def get(self, id_prefix: str) -> Measurement:
        """Return the measurement whose id starts so."""
        # Ids are hexadecimal, so every id with this prefix sorts between the prefix and the prefix plus "g".
        condition = "WHERE id >= :prefix AND id < :prefix || 'g'"
        return single_match(id_prefix, self._measurements(condition, {"prefix": id_prefix, "limit": 2}))

    def forget(self, id_prefix: str) -> Measurement:
        """Remove the measurement whose id starts so, and return it."""
        measurement = self.get(id_prefix)

        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.execute("DELETE FROM measurements WHERE id = ?", (measurement.id,))

        self._run(work)
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
        filters = {"model": model, "strategy": strategy, "outcome": outcome}
        conditions = [f"{name} = :{name}" for name, value in filters.items() if value is not None]
        if fingerprint is not None:
            conditions.append(_MADE_ON)
        if parameters is not None:
            conditions.append("json_extract(plan, '$.model.parameters') = :parameters")
        condition = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        # A negative limit is none.
        bounds = {"fingerprint": fingerprint, "parameters": parameters, "limit": -1 if limit is None else limit}
        return self._measurements(condition, {**filters, **bounds})

    def find(self, plan_key: str, fingerprint: str) -> Measurement | None:
        """Return the newest completed measurement of a plan on a machine, or None."""
        values = {"plan_key": plan_key, "fingerprint": fingerprint, "limit": 1}
        matches = self._measurements(f"WHERE plan_key = :plan_key AND {_MADE_ON}", values)
        return matches[0] if matches else None

    def rates(self, fingerprint: str | None = None) -> tuple[RateMeasurement, ...]:
        """Return the rates measured there, or everywhere."""
        condition = "" if fingerprint is None else f"WHERE {_MADE_ON}"
        return self._query(f"{rows.SELECT_RATES} {condition} {_NEWEST_FIRST}", {"fingerprint": fingerprint}, rows.rate)

    def add_trace(self, trace: TraceRecord) -> bool:
        """Store a trace; return whether its key is new."""
        return self._insert(rows.INSERT_TRACE, rows.trace_row(trace))

    def trace(self, key: str) -> TraceRecord | None:
        """Return the trace with this key, or None."""
        matches = self._traces("key = ?", key)
        return matches[0] if matches else None

    def traces(self, series: str) -> tuple[TraceRecord, ...]:
        """Return the traces of one series."""
        return self._traces("series = ?", series)

    def add_calibration(self, calibration: CalibrationRecord) -> None:
        """Store a calibration, unless its id is there."""
        self._insert(rows.INSERT_CALIBRATION, rows.calibration_row(calibration))

    def calibration(self, hardware: HardwareKind) -> CalibrationRecord | None:
        """Return the newest calibration of this kind of hardware, or None."""
        matches = self._calibrations("WHERE key = ?", hardware.key)
        return matches[0] if matches else None

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """Return all calibrations, newest first."""
        return self._calibrations("")

    def count(self) -> int:
        """Return how many measurements there are."""
        return self._run(lambda connection: int(connection.execute("SELECT count(*) FROM measurements").fetchone()[0]))

    def report(self, status: StatusReport) -> None:
        """Put a report in the place of the run's last one."""
        self._insert(rows.upsert_report(_NOW), rows.report_row(status))

    def reports(self, limit: int | None = None) -> tuple[StatusReport, ...]:
        """Return the last reports of runs, the newest first."""
        query = f"{rows.select_reports(_NOW)} ORDER BY heard_at DESC, id DESC LIMIT :limit"
        return self._query(query, {"limit": -1 if limit is None else limit}, rows.report)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _traces(self, condition: str, value: str) -> tuple[TraceRecord, ...]:
        query = f"{rows.SELECT_TRACES} WHERE {condition} ORDER BY created_at DESC, key DESC"
        return self._query(query, (value,), rows.trace)

    def _calibrations(self, condition: str, *values: str) -> tuple[CalibrationRecord, ...]:
        return self._query(f"{rows.SELECT_CALIBRATIONS} {condition} {_NEWEST_FIRST}", values, rows.calibration)

    def _measurements(self, condition: str, values: dict[str, object]) -> tuple[Measurement, ...]:
        query = f"{rows.SELECT_MEASUREMENTS} {condition} {_NEWEST_FIRST} LIMIT :limit"
        return self._query(query, values, rows.measurement)

    def _insert(self, statement: str, row: Sequence[object]) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            with transaction(connection):
                return connection.execute(statement, row).rowcount == 1

        return self._run(work)

    def _query(self, query: str, values: Any, read: Callable[[tuple[Any, ...]], Answer]) -> tuple[Answer, ...]:
        def work(connection: sqlite3.Connection) -> tuple[Answer, ...]:
            fetched = connection.execute(query, values).fetchall()
            try:
                return tuple(read(row) for row in fetched)
            except (RecordError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise DamagedFile.record(self.path) from error

        return self._run(work)

    def _run(self, work: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Do some work; once more where the file was damaged, or is not the one at `path` any more."""
        for _ in range(_REPAIRS):
            try:
                with clear_errors(self.path):
                    answer = work(self._connection)
                if self._is_current():
                    return answer
            except DamagedFile:
                if not self._repair():
                    raise
            self._connection.close()
            self._connection = self._open()
        with clear_errors(self.path):
            return work(self._connection)

    def _open(self) -> sqlite3.Connection:
        self._inode = _inode(self.path)
        try:
            connection = connect(self.path, thorough=self._thorough)
        except DamagedFile:
            if not self._repair():
                raise
            connection = connect(self.path, thorough=self._thorough)
        self._inode = _inode(self.path)
        return connection

    def _repair(self) -> bool:
        from hardware_db.store.repair import repair

        return repair(self.path, self._inode)

    def _is_current(self) -> bool:
        return _inode(self.path) in (self._inode, None)


def _inode(path: Path) -> int | None:
    """Return the inode, which tells a file from another of the same name, or None without a file."""
    try:
        return path.stat().st_ino
    except OSError:
        return None
