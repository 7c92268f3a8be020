"""The store in a SQLite file."""

from __future__ import annotations

from pathlib import Path

from hardware_db.calibration_record import CalibrationRecord, HardwareKind
from hardware_db.measurement import Measurement, Outcome, RateMeasurement, Record
from hardware_db.store import rows
from hardware_db.store.connection import clear_errors, connect, transaction
from hardware_db.store.contract import Store, single_match
from hardware_db.trace_record import TraceRecord

_NEWEST_FIRST = "ORDER BY created_at DESC, id DESC"
_MADE_ON = "(fingerprint = :fingerprint OR substr(fingerprint, 1, instr(fingerprint, '-') - 1) = :fingerprint)"


class SqliteStore(Store):
    """One connection to the file at `path`; see Store for what holds.

    Raises:
        BrokenFile: on opening, the file cannot be used; the message says why and what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = connect(path)

    def add(self, *records: Record) -> int:
        added = 0
        with clear_errors(self.path), transaction(self._connection):
            for record in records:
                self._connection.execute(rows.INSERT_FINGERPRINT, rows.fingerprint_row(record.fingerprint))
                if isinstance(record, Measurement):
                    cursor = self._connection.execute(rows.INSERT_MEASUREMENT, rows.measurement_row(record))
                else:
                    cursor = self._connection.execute(rows.INSERT_RATE, rows.rate_row(record))
                added += cursor.rowcount
        return added

    def get(self, id_prefix: str) -> Measurement:
        # Ids are hexadecimal, so every id with this prefix sorts between the prefix and the prefix plus "g".
        condition = "WHERE id >= :prefix AND id < :prefix || 'g'"
        return single_match(id_prefix, self._measurements(condition, {"prefix": id_prefix, "limit": 2}))

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
        values = {"plan_key": plan_key, "fingerprint": fingerprint, "limit": 1}
        found = self._measurements(f"WHERE plan_key = :plan_key AND {_MADE_ON}", values)
        return found[0] if found else None

    def rates(self, fingerprint: str | None = None) -> tuple[RateMeasurement, ...]:
        condition = "" if fingerprint is None else f"WHERE {_MADE_ON}"
        query = f"{rows.SELECT_RATES} {condition} {_NEWEST_FIRST}"
        with clear_errors(self.path):
            found = self._connection.execute(query, {"fingerprint": fingerprint}).fetchall()
        return tuple(rows.rate(row) for row in found)

    def add_trace(self, trace: TraceRecord) -> bool:
        with clear_errors(self.path), transaction(self._connection):
            return self._connection.execute(rows.INSERT_TRACE, rows.trace_row(trace)).rowcount == 1

    def trace(self, key: str) -> TraceRecord | None:
        found = self._traces("key = ?", key)
        return found[0] if found else None

    def traces(self, series: str) -> tuple[TraceRecord, ...]:
        return self._traces("series = ?", series)

    def add_calibration(self, calibration: CalibrationRecord) -> None:
        with clear_errors(self.path), transaction(self._connection):
            self._connection.execute(rows.INSERT_CALIBRATION, rows.calibration_row(calibration))

    def calibration(self, hardware: HardwareKind) -> CalibrationRecord | None:
        found = self._calibrations("WHERE key = ?", hardware.key)
        return found[0] if found else None

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        return self._calibrations("")

    def count(self) -> int:
        with clear_errors(self.path):
            return int(self._connection.execute("SELECT count(*) FROM measurements").fetchone()[0])

    def close(self) -> None:
        self._connection.close()

    def _traces(self, condition: str, value: str) -> tuple[TraceRecord, ...]:
        query = f"{rows.SELECT_TRACES} WHERE {condition} ORDER BY created_at DESC, key DESC"
        with clear_errors(self.path):
            found = self._connection.execute(query, (value,)).fetchall()
        return tuple(rows.trace(row) for row in found)

    def _calibrations(self, condition: str, *values: str) -> tuple[CalibrationRecord, ...]:
        query = f"{rows.SELECT_CALIBRATIONS} {condition} {_NEWEST_FIRST}"
        with clear_errors(self.path):
            found = self._connection.execute(query, values).fetchall()
        return tuple(rows.calibration(row) for row in found)

    def _measurements(self, condition: str, values: dict[str, object]) -> tuple[Measurement, ...]:
        query = f"{rows.SELECT_MEASUREMENTS} {condition} {_NEWEST_FIRST} LIMIT :limit"
        with clear_errors(self.path):
            found = self._connection.execute(query, values).fetchall()
        return tuple(rows.measurement(row) for row in found)
