"""Measurements, rates, traces and calibrations as rows and back, in SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from hardware_db.files import canonical_json
from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions
from hardware_db.measurement import (
    CalibrationRecord,
    HardwareKind,
    Measured,
    Measurement,
    Predicted,
    RateMeasurement,
    TraceRecord,
)
from hardware_db.store.reports import StatusReport

_IDENTITY = ("id", "created_at", "outcome", "source", "plan")
_MEASURED = tuple(item.name for item in fields(Measured))
_PREDICTED = tuple(item.name for item in fields(Predicted))
_FIGURES = (*_MEASURED, *(f"predicted_{name}" for name in _PREDICTED))
_DERIVED = ("fingerprint", "model", "strategy", "plan_key")
_TRACE = ("key", "series", "created_at", "document")
_CALIBRATION = ("id", "created_at", "key", "device", "intra_link", "inter_link", "document")
_RATE = (
    *("id", "created_at", "source", "operation", "dtype", "size", "ranks", "value", "unit"),
    *("spread", "repeats", "shape"),
)

_REPORT = tuple(item.name for item in fields(StatusReport) if item.compare)
_RENAMED = {"user": "origin_user", "host": "origin_host", "alerts_json": "alerts"}
_REPORT_COLUMNS = tuple(_RENAMED.get(name, name) for name in _REPORT)


def _insert(table: str, columns: tuple[str, ...]) -> str:
    places = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places}) ON CONFLICT DO NOTHING"


def _select(table: str, columns: tuple[str, ...]) -> str:
    return (
        f"SELECT {', '.join(columns)}, machine, versions FROM {table}"
        f" JOIN fingerprints ON fingerprints.key = {table}.fingerprint"
    )


UNKNOWN = "{}"
"""Machine and versions of a fingerprint of which a repair found the key alone."""
# The next run of that machine says again what it is.
INSERT_FINGERPRINT = (
    "INSERT INTO fingerprints (key, machine, versions) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE"
    f" SET machine = excluded.machine, versions = excluded.versions WHERE fingerprints.machine = '{UNKNOWN}'"
)
INSERT_MEASUREMENT = _insert("measurements", (*_IDENTITY, *_DERIVED, *_FIGURES))
INSERT_RATE = _insert("rates", (*_RATE, "fingerprint"))
INSERT_TRACE = _insert("traces", _TRACE)
INSERT_CALIBRATION = _insert("calibrations", _CALIBRATION)
SELECT_MEASUREMENTS = _select("measurements", (*_IDENTITY, *_FIGURES))
SELECT_RATES = _select("rates", _RATE)
SELECT_TRACES = f"SELECT {', '.join(_TRACE)} FROM traces"

SELECT_CALIBRATIONS = f"SELECT {', '.join(_CALIBRATION)} FROM calibrations"


def fingerprint_row(fingerprint: Fingerprint) -> tuple[str, str, str]:
    """Return the row of INSERT_FINGERPRINT."""
    return (
        fingerprint.key,
        canonical_json(asdict(fingerprint.machine)),
        canonical_json(asdict(fingerprint.versions)),
    )


def measurement_row(record: Measurement) -> tuple[object, ...]:
    """Return the row of INSERT_MEASUREMENT.

    Model, strategy and plan key are columns only so that SQL can select by them.
    """
    identity = (record.id, record.created_at, record.outcome, record.source, record.plan_json)
    derived = (record.fingerprint.key, record.model, record.strategy, record.plan_key)
    return (*identity, *derived, *asdict(record.measured).values(), *asdict(record.predicted).values())


def rate_row(record: RateMeasurement) -> tuple[object, ...]:
    """Return the row of INSERT_RATE."""
    shape = ",".join(map(str, record.shape))
    return (*(getattr(record, name) for name in _RATE[:-1]), shape, record.fingerprint.key)


def measurement(row: tuple[Any, ...]) -> Measurement:
    """Return the measurement of a row of SELECT_MEASUREMENTS."""
    identity = row[: len(_IDENTITY)]
    figures = row[len(_IDENTITY) : -2]
    return Measurement(
        id=identity[0],
        created_at=identity[1],
        outcome=identity[2],
        source=identity[3],
        plan_json=identity[4],
        fingerprint=_fingerprint(*row[-2:]),
        measured=Measured(**dict(zip(_MEASURED, figures, strict=False))),
        predicted=Predicted(**dict(zip(_PREDICTED, figures[len(_MEASURED) :], strict=True))),
    )


def rate(row: tuple[Any, ...]) -> RateMeasurement:
    """Return the rate of a row of SELECT_RATES."""
    values = dict(zip(_RATE, row, strict=False))
    shape = tuple(int(extent) for extent in values.pop("shape").split(",") if extent)
    return RateMeasurement(**values, shape=shape, fingerprint=_fingerprint(*row[-2:]))


def trace_row(record: TraceRecord) -> tuple[str, str, str, str]:
    """Return the row of INSERT_TRACE."""
    return record.key, record.series, record.created_at, record.document_json


def trace(row: tuple[str, str, str, str]) -> TraceRecord:
    """Return the trace of a row of SELECT_TRACES."""
    key, series, created_at, document = row
    return TraceRecord(key=key, series=series, created_at=created_at, document_json=document)


def calibration_row(record: CalibrationRecord) -> tuple[str, ...]:
    """Return the row of INSERT_CALIBRATION."""
    kind = record.hardware
    return (
        *(record.id, record.created_at, kind.key),
        *(kind.device, kind.intra_link, kind.inter_link, record.document_json),
    )


def calibration(row: tuple[str, ...]) -> CalibrationRecord:
    """Return the calibration of a row of SELECT_CALIBRATIONS."""
    id, created_at, _, device, intra_link, inter_link, document = row
    hardware = HardwareKind(device=device, intra_link=intra_link, inter_link=inter_link)
    return CalibrationRecord(id=id, created_at=created_at, hardware=hardware, document_json=document)


def upsert_report(now: str) -> str:
    """Return the statement that stores a report, with the store's word for seconds since 1970."""
    marks = ", ".join("?" * len(_REPORT))
    columns = (*_REPORT_COLUMNS, "heard_at")
    changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
    insert = f"INSERT INTO reports ({', '.join(columns)}) VALUES ({marks}, {now})"
    return f"{insert} ON CONFLICT (id) DO UPDATE SET {changes}"


def select_reports(now: str) -> str:
    """Return the query of reports, with the store's word for seconds since 1970."""
    return f"SELECT {', '.join(_REPORT_COLUMNS)}, {now} - heard_at FROM reports"


def report_row(status: StatusReport) -> tuple[object, ...]:
    """Return the row of `upsert_report`."""
    return tuple(getattr(status, name) for name in _REPORT)


def report(row: tuple[Any, ...]) -> StatusReport:
    """Return the report of a row of `select_reports`; a clock that was set back makes nothing younger than now."""
    return StatusReport(**dict(zip(_REPORT, row, strict=False)), heard_seconds_ago=max(0.0, float(row[-1])))


@lru_cache(maxsize=256)
def _fingerprint(machine: str, versions: str) -> Fingerprint:
    return Fingerprint(machine=MachineIdentity(**json.loads(machine)), versions=Versions(**json.loads(versions)))
