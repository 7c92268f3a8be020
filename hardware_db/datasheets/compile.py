"""YAML catalogues into the compact JSON that is read at run time; `scripts/generate/catalogues.py` calls it."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hardware_db.datasheets.loader import name_index
from hardware_db.device import Device, FailureRecord, Link, NodeType
from hardware_db.errors import BrokenFile

HERE = Path(__file__).parent
DEVICE_SOURCES = (
    "tflops", "memory_bandwidth", "memory_total", "torch_total", "tdp", "l2", "nvlink", "compute_capability",
)  # fmt: skip
LINK_SOURCES = ("theoretical", "p2p", "busbw", "alpha")
NODE_SOURCES = ("cpu", "ram", "network", "nvme", "gpu")
FAILURE_SOURCES = ("rate", "range")
RECOVERY_SOURCES = ("restart", "checkpoint", "least")


def compile_devices(path: Path = HERE / "devices.yaml") -> str:
    """`devices.yaml` as JSON text: sources, rows, and the position of every name and alias.

    Raises:
        BrokenFile: the file is not YAML, or a row is not what `Device` takes.
    """
    data = read_yaml(path, {"sources", "devices"})
    return _json({"sources": data["sources"], "devices": _table(data, "devices", Device, DEVICE_SOURCES, path)})


def compile_interconnects(path: Path = HERE / "interconnects.yaml") -> str:
    """`interconnects.yaml` as JSON text: links, node types, their failures, and NCCL's latency constants.

    Raises:
        BrokenFile: the file is not YAML, or a row is not what `Link`, `NodeType` or `FailureRecord` takes.
    """
    data = read_yaml(path, {"sources", "latency_constants", "links", "nodes", "failures", "recovery"})
    links = _table(data, "links", Link, LINK_SOURCES, path)
    nodes = _table(data, "nodes", NodeType, NODE_SOURCES, path)
    for row in nodes["rows"]:
        for key in ("intra_link", "inter_link"):
            if key in row and row[key] not in {link["name"] for link in links["rows"]}:
                raise BrokenFile(
                    path, f"row {row['name']!r} key {key!r} names no link: {row[key]!r}", "name one of `links`"
                )
    failures = _table(data, "failures", FailureRecord, FAILURE_SOURCES, path)
    check_sources({"name": "recovery", **data["recovery"]}, RECOVERY_SOURCES, data["sources"], path)
    facts = {key: data[key] for key in ("sources", "latency_constants", "recovery")}
    return _json({**facts, "links": links, "nodes": nodes, "failures": failures})


def read_yaml(path: Path, keys: set[str]) -> dict[str, Any]:
    """Return a YAML mapping with exactly these top-level keys.

    Raises:
        BrokenFile: the file cannot be read, is not YAML, or has other keys.
    """
    import yaml  # slow to import, and only the compiler of catalogues needs it

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise BrokenFile(path, error.strerror or "cannot be read") from error
    except yaml.YAMLError as error:
        raise BrokenFile(path, f"is not YAML ({' '.join(str(error).split())})", "fix that line") from error
    if not isinstance(data, dict) or set(data) != keys:
        content = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise BrokenFile(path, f"holds {content}", f"the top level must be {', '.join(sorted(keys))}")
    return data


def _table(data: dict[str, Any], key: str, value_type: type, sources: tuple[str, ...], path: Path) -> dict[str, Any]:
    rows = [check_row(row, value_type, path, position) for position, row in enumerate(data[key])]
    for row in rows:
        priced = ("price",) if "usd_per_hour" in row else ()
        check_sources(row, (*sources, *priced), data["sources"], path)
    return {"names": name_index(rows, path), "rows": rows}


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


# Strict reading of rows: unknown keys, missing keys and wrong types name file, row and key.


def check_row(row: object, value_type: type, path: Path, position: int) -> dict[str, Any]:
    """One YAML row that holds exactly what the dataclass `value_type` takes; null means unknown and is dropped.

    Raises:
        BrokenFile: the row is not a mapping, a key is unknown, missing, or of the wrong type.
    """
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise BrokenFile(path, f"row {position} has no name", "every row is a mapping that begins with `name:`")
    where = f"row {row['name']!r}"
    hints = get_type_hints(value_type)
    unknown = [str(key) for key in row if key not in hints]
    if unknown:
        raise BrokenFile(path, f"{where} has unknown key {unknown[0]!r}", f"keys are {', '.join(hints)}")
    for field in dataclasses.fields(value_type):
        given = row.get(field.name)
        if given is None and _is_required(field):
            raise BrokenFile(path, f"{where} lacks {field.name!r}", "add it")
        if given is not None and not _matches(given, hints[field.name]):
            expected = _describe(hints[field.name])
            raise BrokenFile(path, f"{where} key {field.name!r} is {given!r}", f"write {expected}")
    return {key: given for key, given in row.items() if given is not None}


def check_sources(row: Mapping[str, Any], groups: Iterable[str], sources: Mapping[str, str], path: Path) -> None:
    """Every field group of a row cites at least one key of the file's table of sources.

    Raises:
        BrokenFile: a group cites nothing, or something that is not in the table.
    """
    cited = row.get("source", {})
    for group in groups:
        keys = cited.get(group)
        if not keys:
            raise BrokenFile(path, f"row {row['name']!r} gives no source for {group!r}", "cite a key of `sources`")
        unknown = [key for key in keys if key not in sources]
        if unknown:
            raise BrokenFile(
                path, f"row {row['name']!r} cites {unknown[0]!r} for {group!r}", "add it to `sources` or cite another"
            )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _matches(given: object, hint: Any) -> bool:
    """Return whether a YAML value is of an annotated type; an int passes for a float, a bool for neither."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(given, option) for option in get_args(hint))
    if origin is tuple:
        return isinstance(given, list) and all(_matches(item, get_args(hint)[0]) for item in given)
    if origin is not None:
        key_hint, value_hint = get_args(hint)
        return isinstance(given, dict) and all(
            _matches(key, key_hint) and _matches(value, value_hint) for key, value in given.items()
        )
    if hint in (int, float):
        accepted = int if hint is int else (int, float)
        return isinstance(given, accepted) and not isinstance(given, bool) and given >= 0
    return isinstance(given, hint)


def _describe(hint: Any) -> str:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}
    collections = {tuple: "a list", Mapping: "a mapping"}
    return " or ".join(
        words.get(option) or collections.get(get_origin(option) or option) or "a mapping" for option in options
    )
