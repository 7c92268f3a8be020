"""What was learnt from stored runs: errors before and after, and the factors that moved."""

from __future__ import annotations

import math
from typing import Any

from dsplan.render.blocks import Block, Table, Text, columns
from hardware_db.measurement import HardwareKind
from planner.calibration.calibration import Calibration
from planner.calibration.learn import Calibrated, Refreshed
from planner.calibration.spread import NINE_OF_TEN

_MOVED = 0.005
"""A factor that changed by less is not shown."""


def calibration_blocks(refreshed: Refreshed, *, stored: bool) -> list[Block]:
    """One table of the kinds of hardware, one of the factors of each, and what was not learnt and why."""
    table = Table(
        columns=columns("hardware", ">runs", ">models", ">error before", ">error after", "outcome"),
        rows=[_row(kind, stored=stored) for kind in refreshed.kinds],
    )
    reasons = [
        Text(text=f"{hardware_name(kind.hardware)}: {kind.lesson.reason}", style="warning")
        for kind in refreshed.kinds
        if kind.lesson.reason
    ]
    splits = sorted({kind.lesson.split for kind in refreshed.kinds if kind.lesson.error_after is not None})
    notes = [Text(text=f"errors are medians over runs with {split}", style="faint") for split in splits]
    skipped = f"{refreshed.skipped} runs are of models or hardware that cannot be priced again, and are left out"
    left = [Text(text=skipped, style="faint")] if refreshed.skipped else []
    factors = [
        _factors(kind.hardware, kind.lesson.calibration)
        for kind in refreshed.kinds
        if kind.lesson.calibration is not None
    ]
    return [table, *notes, *factors, *reasons, *left]


def calibration_json(refreshed: Refreshed, *, stored: bool) -> dict[str, Any]:
    """The same as the JSON object that `dsplan db calibrate --json` prints."""
    return {
        "schema_version": 1,
        "calibrations": [_document(kind, stored=stored) for kind in refreshed.kinds],
        "skipped": refreshed.skipped,
    }


def hardware_name(hardware: HardwareKind) -> str:
    """A kind of hardware in a few words."""
    links = " + ".join(link for link in (hardware.intra_link, hardware.inter_link) if link)
    return f"{hardware.device}, {links}" if links else hardware.device


def _row(kind: Calibrated, *, stored: bool) -> list[str]:
    lesson = kind.lesson
    models = len(lesson.calibration.models) if lesson.calibration else None
    return [
        hardware_name(kind.hardware),
        str(lesson.rows),
        "-" if models is None else str(models),
        _percent(lesson.error_before),
        _percent(lesson.error_after),
        _outcome(kind, stored=stored),
    ]


def _outcome(kind: Calibrated, *, stored: bool) -> str:
    if kind.lesson.calibration is None:
        return "refused" if not kind.is_new else "withdrawn" if stored else "would be withdrawn"
    if not kind.is_new:
        return "in force already"
    return "in force" if stored else "would be stored"


def _factors(hardware: HardwareKind, calibration: Calibration) -> Table:
    rows = [
        [name, f"{factor:.2f}", f"{low:.2f} to {high:.2f}"]
        for name, (factor, low, high) in _intervals(calibration).items()
        if abs(factor - 1) > _MOVED
    ]
    title = f"rates of {hardware_name(hardware)}, over what is shipped"
    return Table(title=title, columns=columns("rate", ">factor", ">90 %"), rows=rows)


def _intervals(calibration: Calibration) -> dict[str, tuple[float, float, float]]:
    """Each fitted factor with the interval that holds it with nine chances of ten."""
    found = {}
    for index, name in enumerate(calibration.names):
        factor = getattr(calibration.factors, name)
        half = math.exp(NINE_OF_TEN * math.sqrt(calibration.covariance[index][index]))
        found[name] = (factor, factor / half, factor * half)
    return found


def _document(kind: Calibrated, *, stored: bool) -> dict[str, Any]:
    lesson, calibration = kind.lesson, kind.lesson.calibration
    factors = {} if calibration is None else _intervals(calibration)
    return {
        "hardware": {
            "device": kind.hardware.device,
            "intra_link": kind.hardware.intra_link,
            "inter_link": kind.hardware.inter_link,
        },
        "rows": lesson.rows,
        "configurations": lesson.configurations,
        "split": lesson.split,
        "error_before": lesson.error_before,
        "error_after": lesson.error_after,
        "factors": {name: {"value": value, "low": low, "high": high} for name, (value, low, high) in factors.items()},
        "stored": stored and kind.is_new and calibration is not None,
        "reason": lesson.reason,
    }


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"
