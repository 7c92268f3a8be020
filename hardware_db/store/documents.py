"""Records as JSON objects and back, strictly: what `db export` writes and `db import` reads."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeVar

from hardware_db.files import canonical_json
from hardware_db.from_json import WrongValue, from_json
from hardware_db.measurement import Measurement, RateMeasurement, Record, RecordError

SCHEMA_VERSION = 1

_Value = TypeVar("_Value")


def to_document(record: Record) -> dict[str, object]:
    """The JSON object of a record: `kind` (measurement or rate), `schema_version`, and the record's fields.

    A measurement's plan is the object of `estimate --json` itself, under `plan`.
    """
    kind = "measurement" if isinstance(record, Measurement) else "rate"
    document: dict[str, object] = {"kind": kind, "schema_version": SCHEMA_VERSION, **asdict(record)}
    if "plan_json" in document:
        document["plan"] = json.loads(str(document.pop("plan_json")))
    return document


def from_document(document: object) -> Record:
    """The record of a JSON object.

    Raises:
        RecordError: a key is missing, unknown or holds the wrong kind of value, or the schema is a newer one.
    """
    values = dict(_object(document, "line"))
    kind, version = values.pop("kind", None), values.pop("schema_version", None)
    if kind not in ("measurement", "rate"):
        raise RecordError("kind", f"is {reprlib.repr(kind)}; it must be measurement or rate")
    if type(version) is int and version > SCHEMA_VERSION:
        raise RecordError(
            "schema_version", f"{version} is newer than {SCHEMA_VERSION}, which this dsplan reads; upgrade it"
        )
    if type(version) is not int or version != SCHEMA_VERSION:
        raise RecordError("schema_version", f"is {reprlib.repr(version)}; it must be {SCHEMA_VERSION}")
    if kind == "rate":
        return _build(RateMeasurement, values)
    if "plan_json" in values:
        raise RecordError("plan_json", "is not a key; the plan is an object under plan")
    if "plan" in values:
        values["plan_json"] = canonical_json(_object(values.pop("plan"), "plan"))
    return _build(Measurement, values)


def _build(kind: type[_Value], values: dict[str, object]) -> _Value:
    try:
        return from_json(kind, values, spelled={"plan_json": "plan"})
    except WrongValue as wrong:
        raise RecordError(wrong.where, wrong.problem) from None


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise RecordError(where, f"is {reprlib.repr(value)}; it must be an object")
    return value
