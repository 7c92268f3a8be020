"""Records as JSON objects and back, strictly: what `db export` writes and `db import` reads."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from hardware_db.files import canonical_json
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
        return _build(RateMeasurement, values, "")
    if "plan_json" in values:
        raise RecordError("plan_json", "is not a key; the plan is an object under plan")
    if "plan" in values:
        values["plan_json"] = canonical_json(_object(values.pop("plan"), "plan"))
    return _build(Measurement, values, "", spelled={"plan_json": "plan"})


def _build(cls: type[_Value], document: object, where: str, *, spelled: Mapping[str, str] | None = None) -> _Value:
    """A dataclass from an object with exactly its keys; `spelled` gives the object's word for a field, in messages."""
    values = _object(document, where or "line")
    known: dict[str, Field[Any]] = {item.name: item for item in fields(cast("Any", cls))}
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in known:
            raise RecordError(f"{prefix}{name}", f"is not a key; the keys are {', '.join(known)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise RecordError(f"{prefix}{(spelled or {}).get(name, name)}", "is missing")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value, f"{prefix}{name}") for name, value in values.items()})


def _value(hint: Any, value: object, where: str) -> object:
    if is_dataclass(hint):
        return _build(cast("type[object]", hint), value, where)
    if get_origin(hint) is tuple:
        return _tuple(get_args(hint)[0], value, where)
    allowed = (str,) if get_origin(hint) is Literal else get_args(hint) or (hint,)
    if (type(value) is int and float not in allowed and int in allowed) or (type(value) is str and str in allowed):
        return value
    if value is None and NoneType in allowed:
        return None
    if type(value) in (int, float) and float in allowed:
        return _float(cast("int | float", value), where)
    names = {str: "text", int: "a whole number", float: "a number", NoneType: "null"}
    wanted = " or ".join(names[option] for option in allowed)
    raise RecordError(where, f"is {reprlib.repr(value)}; it must be {wanted}")


def _tuple(hint: Any, value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise RecordError(where, f"is {reprlib.repr(value)}; it must be a list")
    return tuple(_value(hint, item, f"{where}[{index}]") for index, item in enumerate(value))


def _float(value: int | float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RecordError(where, "is beyond any floating-point number") from None


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise RecordError(where, f"is {reprlib.repr(value)}; it must be an object")
    return value
