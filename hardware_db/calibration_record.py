"""CalibrationRecord: what fitting the cost model to the runs of one kind of hardware found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from hardware_db.canonical import canonical_json, digest
from hardware_db.measurement import new_id, utc_now

_KEY_DIGITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareKind:
    """What one calibration holds for: a device and the links between devices and nodes, by their names in the
    catalogue; empty where there is none."""

    device: str
    intra_link: str = ""
    inter_link: str = ""

    @property
    def key(self) -> str:
        """32 hexadecimal digits that change with any field."""
        return digest(asdict(self), _KEY_DIGITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRecord:
    """One calibration. `document_json` is canonical JSON, whose meaning is the planner's."""

    id: str
    created_at: str
    hardware: HardwareKind
    document_json: str

    @property
    def document(self) -> dict[str, object]:
        """What was found, as a fresh dictionary every time it is asked for."""
        return cast("dict[str, object]", json.loads(self.document_json))


def calibration_record(hardware: HardwareKind, document: Mapping[str, object]) -> CalibrationRecord:
    """The record of a calibration that was just made."""
    return CalibrationRecord(
        id=new_id(), created_at=utc_now(), hardware=hardware, document_json=canonical_json(document)
    )
