"""Calibrating the database: each kind of hardware is learnt from its own runs, and what helped is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hardware_db.files import canonical_json
from hardware_db.measurement import HardwareKind, Measurement, calibration_record
from hardware_db.probe import Machine
from hardware_db.store.contract import Store
from planner.calibration.calibration import calibration_of, hardware_kind
from planner.calibration.learn import Lesson, learn
from planner.calibration.rows import Rebuilder, Row

MOST_ROWS = 300
"""The newest completed runs that are learnt from; more of them would change little and take long."""
OTHER_VERSIONS = 0.2
"""Logarithmic spread between versions of torch: one setting of fms-fsdp gained 20 to 28 % in a year (its README)."""
WITHDRAWN = {"withdrawn": "factors fitted to all runs so far predict those left out worse than the shipped ones"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """What was learnt of one kind of hardware; `is_new` says that the database has something new of it."""

    hardware: HardwareKind
    lesson: Lesson
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """What was learnt of every kind of hardware, and how many runs could not be priced again."""

    kinds: tuple[Calibrated, ...]
    skipped: int


def refresh(store: Store, machine: Machine, *, only: HardwareKind | None = None, keep: bool = True) -> Refreshed:
    """Learns from the stored runs, of every kind of hardware or one `only`; `keep` stores what helped.

    Raises:
        DsplanError: the database cannot be read or written.
    """
    made = [
        measurement
        for measurement in store.list(outcome="completed", limit=MOST_ROWS)
        if measurement.measured.step_seconds
    ]
    rebuilder = Rebuilder(store, machine)
    groups: dict[HardwareKind, list[tuple[Measurement, Row]]] = {}
    skipped = 0
    for measurement in made:
        row = rebuilder.row(measurement)
        if row is None:
            skipped += 1
        elif only in (None, kind := hardware_kind(row.job.cluster)):
            groups.setdefault(kind, []).append((measurement, row))
    kinds = tuple(_calibrated(store, kind, _doubted(group), keep=keep) for kind, group in groups.items())
    return Refreshed(kinds=kinds, skipped=skipped)


def _calibrated(store: Store, kind: HardwareKind, rows: Sequence[Row], *, keep: bool) -> Calibrated:
    lesson = learn(rows)
    known = calibration_of(store, rows[0].job.cluster)
    if lesson.calibration is not None:
        document = lesson.calibration.as_document()
        is_new = known is None or canonical_json(known.as_document()) != canonical_json(document)
    else:
        document = dict(WITHDRAWN)
        is_new = known is not None and lesson.error_after is not None
    if keep and is_new:
        store.add_calibration(calibration_record(kind, document))
    return Calibrated(hardware=kind, lesson=lesson, is_new=is_new)


def _doubted(group: Sequence[tuple[Measurement, Row]]) -> list[Row]:
    """The rows, newest first; those of other versions of torch than the newest run's say less of the next one."""
    newest = group[0][0].fingerprint.versions.torch
    return [
        row if measurement.fingerprint.versions.torch == newest else replace(row, doubt=OTHER_VERSIONS)
        for measurement, row in group
    ]
