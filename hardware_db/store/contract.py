"""The contract of every store of measurements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from hardware_db.errors import DsplanError
from hardware_db.measurement import (
    CalibrationRecord,
    HardwareKind,
    Measurement,
    Outcome,
    RateMeasurement,
    Record,
    TraceRecord,
)
from hardware_db.store.reports import Origin, StatusReport

Opened = TypeVar("Opened", bound="Store")


class Store(ABC):
    """Measurements of runs and rates of micro-benchmarks, kept for good.

    Traces and calibrations, which can be found anew.

    What every store holds to, and `tests/hardware_db/store` checks for each:

    * Values leave and enter, never rows: what `get` returns equals what was added, and is frozen.
    * Records are added and never changed. Adding an id that is already there changes nothing, so a run that is imported
      twice, or by two people, counts once.
    * `add` stores all of its records or, when it raises, none. Once it returned, the records survive the process.
    * Any number of processes may add at once; each waits its turn and nothing is lost. One Store object belongs to the
      process and the thread that opened it: open another after a fork.
    * Lists come newest first, by `created_at`, then by id.
    * A fingerprint argument is the key of a Fingerprint (that machine with those versions), or the key of its machine
      alone (any versions).
    * Traces hold to the same: a key that is there already keeps its first answer, and they come newest first.
    * Calibrations are added and never changed; the newest of a kind of hardware is in force.
    * A run has one report, which the next takes the place of. The store dates them by its own clock, so that the clocks
      of those who report may differ.
    * Expected failures (no record, a locked, full, read-only or broken file) are a DsplanError of one line.
    """

    @abstractmethod
    def add(self, *records: Record) -> int:
        """Store the records in one transaction and return how many were not there before."""

    @abstractmethod
    def get(self, id_prefix: str) -> Measurement:
        """Return the measurement whose id starts so.

        Raises:
            DsplanError: no measurement starts so, or several do.
        """

    @abstractmethod
    def forget(self, id_prefix: str) -> Measurement:
        """Remove the measurement whose id starts so, and return it.

        Raises:
            DsplanError: no measurement starts so, or several do.
        """

    @abstractmethod
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
        """Return the newest `limit` measurements that match every filter given.

        Model names match in any case, `parameters` is how many the model has.
        """

    @abstractmethod
    def find(self, plan_key: str, fingerprint: str) -> Measurement | None:
        """Return the newest measurement of this plan there, whatever its outcome, or None if it never ran."""

    @abstractmethod
    def rates(self, fingerprint: str | None = None) -> tuple[RateMeasurement, ...]:
        """Return the rates measured there, or everywhere."""

    @abstractmethod
    def add_trace(self, trace: TraceRecord) -> bool:
        """Store a trace in one transaction and say whether its key was not there before."""

    @abstractmethod
    def trace(self, key: str) -> TraceRecord | None:
        """Return the trace with this key, or None if it was never made."""

    @abstractmethod
    def traces(self, series: str) -> tuple[TraceRecord, ...]:
        """Return the traces of one series."""

    @abstractmethod
    def add_calibration(self, calibration: CalibrationRecord) -> None:
        """Store a calibration in one transaction; one whose id is there already changes nothing."""

    @abstractmethod
    def calibration(self, hardware: HardwareKind) -> CalibrationRecord | None:
        """Return the newest calibration of this kind of hardware, or None if there is none."""

    @abstractmethod
    def calibrations(self) -> tuple[CalibrationRecord, ...]:
        """All calibrations."""

    @abstractmethod
    def count(self) -> int:
        """Return how many measurements there are; nothing else is counted."""

    @abstractmethod
    def report(self, status: StatusReport) -> None:
        """Put a report in the place of the run's last one, in one transaction."""

    @abstractmethod
    def reports(self, limit: int | None = None) -> tuple[StatusReport, ...]:
        """Return the last reports of the `limit` runs that were heard of last, the newest first."""

    def origin(self, id: str) -> Origin | None:
        """Return who added the measurement with this id, where the store keeps it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Releases the file. The store cannot be used afterwards; closing twice is harmless."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def single_match(id_prefix: str, matches: tuple[Measurement, ...]) -> Measurement:
    """Return the only one of `matches`, of which two are enough to tell that there are several.

    Raises:
        DsplanError: there are none or several.
    """
    if not matches:
        raise DsplanError(f"no measurement has an id that starts with {id_prefix!r}; see `dsplan db list`")
    if len(matches) > 1:
        ids = " and ".join(measurement.id for measurement in matches[:2])
        raise DsplanError(
            f"several measurements have ids that start with {id_prefix!r}, such as {ids}; give more digits"
        )
    return matches[0]
