"""The twin of the database that lives and dies with the process, for tests and for machines without a disk."""

from __future__ import annotations

import time
from dataclasses import replace

from hardware_db.fingerprint import Fingerprint
from hardware_db.measurement import (
    CalibrationRecord,
    HardwareKind,
    Measurement,
    Outcome,
    RateMeasurement,
    Record,
    TraceRecord,
)
from hardware_db.store.contract import Store, single_match
from hardware_db.store.reports import StatusReport


class MemoryStore(Store):
    """Keeps the values themselves: they are frozen, so nobody can change them."""

    def __init__(self) -> None:
        self._measurements: dict[str, Measurement] = {}
        self._rates: dict[str, RateMeasurement] = {}
        self._traces: dict[str, TraceRecord] = {}
        self._calibrations: dict[str, CalibrationRecord] = {}
        self._reports: dict[str, tuple[float, StatusReport]] = {}

    def add(self, *records: Record) -> int:
        """Store the records in one transaction; return how many are new."""
        before = len(self._measurements) + len(self._rates)
        for record in records:
            if isinstance(record, Measurement):
                self._measurements.setdefault(record.id, record)
            else:
                self._rates.setdefault(record.id, record)
        return len(self._measurements) + len(self._rates) - before

    def get(self, id_prefix: str) -> Measurement:
        """Return the measurement whose id starts so."""
        return single_match(
            id_prefix, tuple(measurement for measurement in self.list() if measurement.id.startswith(id_prefix))
        )

    def forget(self, id_prefix: str) -> Measurement:
        """Remove the measurement whose id starts so, and return it."""
        return self._measurements.pop(self.get(id_prefix).id)

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
        matches = [
            measurement
            for measurement in self._measurements.values()
            if (model is None or measurement.model.lower() == model.lower())
            and strategy in (None, measurement.strategy)
            and outcome in (None, measurement.outcome)
            and parameters in (None, measurement.parameters)
            and _ran_on(measurement.fingerprint, fingerprint)
        ]
        return tuple(sorted(matches, key=_age, reverse=True)[:limit])

    def find(self, plan_key: str, fingerprint: str) -> Measurement | None:
        """Return the newest completed measurement of a plan on a machine, or None."""
        return next(
            (measurement for measurement in self.list(fingerprint=fingerprint) if measurement.plan_key == plan_key),
            None,
        )

    def rates(self, fingerprint: str | None = None) -> tuple[RateMeasurement, ...]:
        """Return the rates measured there, or everywhere."""
        matches = [rate for rate in self._rates.values() if _ran_on(rate.fingerprint, fingerprint)]
        return tuple(sorted(matches, key=_age, reverse=True))

    def add_trace(self, trace: TraceRecord) -> bool:
        """Store a trace; return whether its key is new."""
        return self._traces.setdefault(trace.key, trace) is trace

    def trace(self, key: str) -> TraceRecord | None:
        """Return the trace with this key, or None."""
        return self._traces.get(key)

    def traces(self, series: str) -> tuple[TraceRecord, ...]:
        """Return the traces of one series."""
        matches = (trace for trace in self._traces.values() if trace.series == series)
        return tuple(sorted(matches, key=lambda trace: (trace.created_at, trace.key), reverse=True))

    def add_calibration(self, calibration: CalibrationRecord) -> None:
        """Store a calibration, unless its id is there."""
        self._calibrations.setdefault(calibration.id, calibration)

    def calibration(self, hardware: HardwareKind) -> CalibrationRecord | None:
        """Return the newest calibration of this kind of hardware, or None."""
        return next((calibration for calibration in self.calibrations() if calibration.hardware == hardware), None)

    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """Return all calibrations, newest first."""
        return tuple(sorted(self._calibrations.values(), key=_age, reverse=True))

    def count(self) -> int:
        """Return how many measurements there are."""
        return len(self._measurements)

    def report(self, status: StatusReport) -> None:
        """Put a report in the place of the run's last one."""
        self._reports[status.id] = time.time(), status

    def reports(self, limit: int | None = None) -> tuple[StatusReport, ...]:
        """Return the last reports of runs, the newest first."""
        now = time.time()
        newest = sorted(self._reports.values(), key=lambda dated: (dated[0], dated[1].id), reverse=True)[:limit]
        return tuple(replace(status, heard_seconds_ago=now - heard) for heard, status in newest)

    def close(self) -> None:
        """There is nothing to release."""


def _ran_on(fingerprint: Fingerprint, key: str | None) -> bool:
    return key in (None, fingerprint.key, fingerprint.machine.key)


def _age(record: Record | CalibrationRecord) -> tuple[str, str]:
    return record.created_at, record.id
