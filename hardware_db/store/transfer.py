"""Export and import: a store as JSON lines, one record a line, read back strictly."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from hardware_db.errors import BrokenFile
from hardware_db.files import canonical_json
from hardware_db.from_json import WrongValue, from_json
from hardware_db.measurement import Measurement, RateMeasurement, Record, RecordError
from hardware_db.records import dataclass
from hardware_db.store.contract import Store

SCHEMA_VERSION = 1

_Value = TypeVar("_Value")


def to_document(record: Record) -> dict[str, object]:
    """Return the JSON object of a record: `kind` (measurement or rate), `schema_version`, and the record's fields.

    A measurement's plan is the object of `estimate --json` itself, under `plan`.
    """
    kind = "measurement" if isinstance(record, Measurement) else "rate"
    document: dict[str, object] = {"kind": kind, "schema_version": SCHEMA_VERSION, **asdict(record)}
    if "plan_json" in document:
        document["plan"] = json.loads(str(document.pop("plan_json")))
    return document


def from_document(document: object) -> Record:
    """Return the record of a JSON object.

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


# Files of such objects, one per line.


_DEEPEST = 100
_FILE_REMEDY = "name a file that `dsplan db export` wrote"
_REMEDY = "correct or remove the line; nothing was imported"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportCount:
    """Counts of a file's records: new ones, and those that the store had already."""

    added: int
    skipped: int


def export_text(store: Store) -> str:
    """Every measurement, then every rate, oldest first, as JSON lines; empty for an empty store."""
    return to_lines((*reversed(store.list()), *reversed(store.rates())))


def to_lines(records: Iterable[Record]) -> str:
    """Return records as the text of an export."""
    return "".join(f"{json.dumps(to_document(record), allow_nan=False)}\n" for record in records)


def import_file(store: Store, path: Path) -> ImportCount:
    """Add the records of an export, all or none.

    Those made elsewhere by `dsplan run` or `dsplan bench` get the source `import`, shared ones that of the file.

    Raises:
        BrokenFile: the file cannot be read, or a line (number, key and remedy are named) is no record.
    """
    return import_records(store, tuple(_mark_imported(record, path.name) for record in read_export(path)))


def import_records(store: Store, records: Sequence[Record]) -> ImportCount:
    """Add records as they are; those that the store has already are skipped."""
    added = store.add(*records)
    return ImportCount(added=added, skipped=len(records) - added)


def copy_records(source: Store, target: Store) -> ImportCount:
    """Add to one store what is measured in another, runs and rates; those that it has already are skipped."""
    return import_records(target, (*reversed(source.list()), *reversed(source.rates())))


def read_export(path: Path) -> tuple[Record, ...]:
    """Return the records of an export file; blank lines are skipped.

    Raises:
        BrokenFile: the file cannot be read, holds nothing, or a line (number, key and remedy are named) is no record.
    """
    try:
        # A pipe would be waited for, and some devices never end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise BrokenFile(path, "is not a regular file", _FILE_REMEDY)
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BrokenFile(path, f"cannot be read ({error.strerror})", _FILE_REMEDY) from error
    except UnicodeDecodeError as error:
        raise BrokenFile(path, f"is not UTF-8 text (byte {error.start})", _FILE_REMEDY) from error
    return read_lines(text, str(path))


def read_lines(text: str, where: str) -> tuple[Record, ...]:
    """Return the records in the text of an export, which is named in errors.

    Raises:
        BrokenFile: it holds nothing, or a line is no record.
    """
    lines = enumerate(text.split("\n"), 1)
    records = tuple(_read_line(line, f"{where}, line {number}") for number, line in lines if line.strip())
    if not records:
        raise BrokenFile(where, "holds no records", _FILE_REMEDY)
    return records


def _read_line(line: str, where: str) -> Record:
    try:
        document = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        _check_values(document)
        # Half a surrogate pair is legal in JSON and in nothing that stores or prints text.
        json.dumps(document, ensure_ascii=False).encode()
        return from_document(document)
    except json.JSONDecodeError as error:
        raise BrokenFile(where, f"is not JSON ({error.msg} at column {error.colno})", _REMEDY) from error
    except UnicodeEncodeError as error:
        raise BrokenFile(where, "holds half of a surrogate pair", _REMEDY) from error
    except RecursionError as error:
        raise BrokenFile(where, "is nested too deep", _REMEDY) from error
    except RecordError as error:
        raise BrokenFile(where, str(error), _REMEDY) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise BrokenFile(where, "holds a number that is too long", _REMEDY) from error


def _check_values(document: object) -> None:
    """Refuses what one Python can read and the next, or SQLite, cannot."""
    level = [document]
    for _ in range(_DEEPEST):
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            raise RecordError("a number", "is beyond any floating-point number")
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inner for item in items]
    if level:
        raise RecursionError


def _refuse_constant(name: str) -> float:
    raise RecordError(name, "is not JSON; write null for a figure that is not there")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise RecordError(next(name for name in names if names.count(name) > 1), "appears twice")
    return mapping


SHARED = "shared"
"""The source of a run that `dsplan db share` wrote; with a colon and where it came from once it was imported."""


def is_shared(source: str) -> bool:
    """Return whether a record was measured by a stranger."""
    return source.partition(":")[0] == SHARED


def mark_shared(record: Record, origin: str) -> Record:
    """Return a record as a stranger's, from a file or an address; one that has come further keeps its own origin."""
    return record if record.source.startswith(f"{SHARED}:") else replace(record, source=f"{SHARED}:{origin}")


def _mark_imported(record: Record, file: str) -> Record:
    if is_shared(record.source):
        return mark_shared(record, file)
    return replace(record, source="import") if record.source in ("run", "bench") else record
