"""Stored runs as tables: measured beside predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import cast

from dsplan.render.blocks import Block, Column, Table, Text
from hardware_db.measurement import Measurement, utc_now
from hardware_db.units import format_bytes, format_seconds

_SHORT_ID = 8
_MISSING = "-"


def measurement_table(measurements: Iterable[Measurement]) -> Table:
    """One row a run, in the order given; percentages say how far the prediction was from what was measured."""
    words = (Column(name) for name in ("id", "UTC", "model", "strategy", "outcome"))
    figures = (Column(name, right=True) for name in ("peak, error", "step, error"))
    return Table(columns=(*words, *figures), rows=[_row(measurement) for measurement in measurements])


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
        _with_error(format_bytes, measured.peak_allocated_bytes, predicted.peak_allocated_bytes),
        _with_error(format_seconds, measured.step_seconds, predicted.step_seconds),
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
    known = {name: value for name, value in values.items() if value not in (None, "")}
    rows = [[_words(name), f"{value:.4g}" if isinstance(value, float) else str(value)] for name, value in known.items()]
    return Table(title=title, columns=(Column("what"), Column("value")), rows=rows)


def _machine(measurement: Measurement) -> dict[str, object]:
    machine = asdict(measurement.fingerprint.machine)
    total = machine.pop("device_memory_bytes")
    return {**machine, "device memory": format_bytes(total) if total else ""}


def _error(measured: float | None, predicted: float | None) -> str:
    """How far the prediction was off, in percent of what was measured."""
    return f"{(predicted - measured) / measured:+.0%}" if measured and predicted is not None else _MISSING


def _figure(form: Callable[[float], str], value: float | None) -> str:
    return _MISSING if value is None else form(value)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}"


def _with_error(form: Callable[[float], str], measured: float | None, predicted: float | None) -> str:
    error = _error(measured, predicted)
    return _figure(form, measured) if error == _MISSING else f"{_figure(form, measured)} {error}"


def _short_time(created_at: str) -> str:
    """Month, day and minute this year, the date alone before: what `ls -l` does, to leave room for the figures."""
    this_year = created_at[:4] == utc_now()[:4]
    return created_at[5:16].replace("T", " ") if this_year else created_at[:10]


def _words(name: str) -> str:
    return name.replace("_", " ")
