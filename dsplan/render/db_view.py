"""Views of the database: stored runs measured beside predicted, and factors learnt from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from dsplan.render.show import Block, Text
from dsplan.render.table_columns import Column, Table, columns
from hardware_db.measurement import HardwareKind, Measurement, utc_now
from hardware_db.units import format_bytes, format_seconds
from planner.calibration.calibration import Calibration
from planner.calibration.learn import Calibrated, Refreshed
from planner.calibration.spread import NINE_OF_TEN

_SHORT_ID = 8
_MISSING = "-"


def measurement_table(measurements: Iterable[Measurement]) -> Table:
    """One row a run, in the order given; percentages say how far the prediction was from what was measured."""
    headings = columns("id", "??UTC", "model", "?strategy", "???outcome", "?>peak, error", ">step, error")
    return Table(columns=headings, rows=[_row(measurement) for measurement in measurements])


def measurement_blocks(measurement: Measurement) -> list[Block]:
    """Everything about one run."""
    fingerprint = measurement.fingerprint
    return [
        Text(text=f"{measurement.model} with {measurement.strategy}: {_words(measurement.outcome)}", style="heading"),
        _pairs(
            "run",
            {
                "id": measurement.id,
                "UTC": measurement.created_at[:19].replace("T", " "),
                "source": measurement.source,
                "steps": measurement.measured.steps,
                "first loss": measurement.measured.first_loss,
                "last loss": measurement.measured.last_loss,
            },
        ),
        _comparison(measurement),
        _pairs("plan", cast("dict[str, object]", measurement.plan["plan"])),
        _pairs("machine", {"key": fingerprint.machine.key, **_machine(measurement)}),
        _pairs("versions", {"key": fingerprint.versions.key, **asdict(fingerprint.versions)}),
    ]


def _row(measurement: Measurement) -> list[str]:
    measured, predicted = measurement.measured, measurement.predicted
    return [
        measurement.id[:_SHORT_ID],
        _short_time(measurement.created_at),
        measurement.model,
        measurement.strategy,
        "OOM" if measurement.outcome == "out_of_memory" else measurement.outcome,
        _add_error(format_bytes, measured.peak_allocated_bytes, predicted.peak_allocated_bytes),
        _add_error(format_seconds, measured.step_seconds, predicted.step_seconds),
    ]


def _comparison(measurement: Measurement) -> Table:
    measured, predicted = measurement.measured, measurement.predicted
    figures: list[tuple[str, Callable[[float], str], float | None, float | None]] = [
        ("peak allocated", format_bytes, measured.peak_allocated_bytes, predicted.peak_allocated_bytes),
        ("peak reserved", format_bytes, measured.peak_reserved_bytes, None),
        ("device used", format_bytes, measured.device_used_bytes, None),
        ("host", format_bytes, measured.host_bytes, None),
        ("step", format_seconds, measured.step_seconds, predicted.step_seconds),
        ("tokens/s", _rate, measured.tokens_per_second, None),
    ]
    rows = [
        [name, _figure(form, real), _figure(form, promise), _error(real, promise)]
        for name, form, real, promise in figures
    ]
    right = (Column(name, right=True) for name in ("measured", "predicted", "error"))
    return Table(title="memory and time", columns=(Column(""), *right), rows=rows)


def _pairs(title: str, values: Mapping[str, object]) -> Table:
    given = {name: value for name, value in values.items() if value not in (None, "")}
    rows = [[_words(name), f"{value:.4g}" if isinstance(value, float) else str(value)] for name, value in given.items()]
    return Table(title=title, columns=(Column("what"), Column("value")), rows=rows)


def _machine(measurement: Measurement) -> dict[str, object]:
    machine = asdict(measurement.fingerprint.machine)
    total = machine.pop("device_memory_bytes")
    return {**machine, "device memory": format_bytes(total) if total else ""}


def _error(measured: float | None, predicted: float | None) -> str:
    """Return how far the prediction was off, in percent of what was measured."""
    return f"{(predicted - measured) / measured:+.0%}" if measured and predicted is not None else _MISSING


def _figure(form: Callable[[float], str], value: float | None) -> str:
    return _MISSING if value is None else form(value)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}"


def _add_error(form: Callable[[float], str], measured: float | None, predicted: float | None) -> str:
    error = _error(measured, predicted)
    return _figure(form, measured) if error == _MISSING else f"{_figure(form, measured)} {error}"


def _short_time(created_at: str) -> str:
    """Month, day and minute this year, the date alone before: what `ls -l` does, to leave room for the figures."""
    this_year = created_at[:4] == utc_now()[:4]
    return created_at[5:16].replace("T", " ") if this_year else created_at[:10]


def _words(name: str) -> str:
    return name.replace("_", " ")


_MOVED = 0.005
"""A factor that changed by less is not shown."""


def calibration_blocks(refreshed: Refreshed, *, stored: bool) -> list[Block]:
    """One table of the kinds of hardware, one of the factors of each, and what was not learnt and why."""
    table = Table(
        columns=columns("hardware", "?>runs", "??>models", "?>error before", ">error after", "outcome"),
        rows=[_learnt_row(kind, stored=stored) for kind in refreshed.kinds],
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
    """Return the same as the JSON object that `dsplan db calibrate --json` prints."""
    return {
        "schema_version": 1,
        "calibrations": [_document(kind, stored=stored) for kind in refreshed.kinds],
        "skipped": refreshed.skipped,
    }


def hardware_name(hardware: HardwareKind) -> str:
    """Return a kind of hardware in a few words."""
    links = " + ".join(link for link in (hardware.intra_link, hardware.inter_link) if link)
    return f"{hardware.device}, {links}" if links else hardware.device


def _learnt_row(kind: Calibrated, *, stored: bool) -> list[str]:
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
        for name, (factor, low, high) in factor_intervals(calibration).items()
        if abs(factor - 1) > _MOVED
    ]
    title = f"rates of {hardware_name(hardware)}, over what is shipped"
    return Table(title=title, columns=columns("rate", ">factor", ">90 %"), rows=rows)


def factor_intervals(calibration: Calibration) -> dict[str, tuple[float, float, float]]:
    """Each fitted factor with the interval that holds it with nine chances of ten."""
    intervals = {}
    for index, name in enumerate(calibration.names):
        factor = getattr(calibration.factors, name)
        half = math.exp(NINE_OF_TEN * math.sqrt(calibration.covariance[index][index]))
        intervals[name] = (factor, factor / half, factor * half)
    return intervals


def _document(kind: Calibrated, *, stored: bool) -> dict[str, Any]:
    lesson, calibration = kind.lesson, kind.lesson.calibration
    factors = {} if calibration is None else factor_intervals(calibration)
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
