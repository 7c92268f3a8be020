"""Catalogue rows as values, by name. Reads the compiled JSON and builds only the values that are asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hardware_db.device import Device, FailureRecord, Link, NodeType
from hardware_db.errors import BrokenFile, UnknownName

# How a catalogue name is compared: without case, spaces, dashes and underscores.


_IGNORED = str.maketrans("", "", " -_")


def normalise(name: str) -> str:
    """Return the form in which two spellings of a name are equal: `RTX 4090`, `rtx-4090` and `RTX4090`."""
    return name.lower().translate(_IGNORED)


def name_index(rows: Iterable[Mapping[str, Any]], path: Path) -> dict[str, int]:
    """Every normalised name and alias with the position of its row.

    Raises:
        BrokenFile: two rows answer to one name.
    """
    index: dict[str, int] = {}
    owners: list[str] = []
    for position, row in enumerate(rows):
        owners.append(row["name"])
        for spelling in (row["name"], *row.get("aliases", ())):
            owner = index.setdefault(normalise(spelling), position)
            if owner != position:
                raise BrokenFile(path, f"{owners[owner]!r} and {row['name']!r} both answer to {spelling!r}", "drop one")
    return index


_VENDORS = re.compile(r"^(nvidia|amd|intel)?(geforce|tesla|instinct|quadro|radeon)?")
_GIGABYTES = re.compile(r"([0-9])gi?b?$")

_HERE = Path(__file__).parent
_Value = TypeVar("_Value", Device, Link, NodeType, FailureRecord)


def find_device(name: str) -> Device:
    """Return the accelerator with this name or alias.

    Case, spaces, dashes and underscores do not count, nor does the vendor; `40G` is `40GB`.

    Raises:
        UnknownName: no row answers to the name.
    """
    if normalise(name) not in _devices()["names"]:
        plain = _GIGABYTES.sub(r"\1gb", _VENDORS.sub("", normalise(name)))
        name = plain if plain in _devices()["names"] else name
    return _find("GPU", name, _devices(), Device, "`dsplan devices` lists them all")


def find_link(name: str) -> Link:
    """Return the link with this name or alias.

    Raises:
        UnknownName: no row answers to the name.
    """
    return _find("link", name, _interconnects()["links"], Link, "`dsplan devices --links` lists them all")


def find_node_type(name: str) -> NodeType:
    """Return the node type with this name or alias.

    Raises:
        UnknownName: no row answers to the name.
    """
    return _find("node type", name, _interconnects()["nodes"], NodeType, "`dsplan devices --nodes` lists them all")


@lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """Every accelerator, in the order of `devices.yaml`."""
    return tuple(_build(Device, row) for row in _devices()["rows"])


@lru_cache(maxsize=1)
def links() -> tuple[Link, ...]:
    """Every link, in the order of `interconnects.yaml`."""
    return tuple(_build(Link, row) for row in _interconnects()["links"]["rows"])


@lru_cache(maxsize=1)
def node_types() -> tuple[NodeType, ...]:
    """Every node type, in the order of `interconnects.yaml`."""
    return tuple(_build(NodeType, row) for row in _interconnects()["nodes"]["rows"])


def failure_record(device: str) -> FailureRecord | None:
    """Return the published failures of nodes of this GPU, or None where there are none."""
    table = _interconnects()["failures"]
    position = table["names"].get(normalise(device.partition("-")[0]))
    return None if position is None else _build(FailureRecord, table["rows"][position])


@lru_cache(maxsize=1)
def recovery() -> Mapping[str, Any]:
    """Return what follows a failure where nobody says.

    `restart_minutes`, `checkpoint_gbs_per_node` (1e9 bytes/s) and the `least_save_seconds` of several nodes.
    """
    constants: Mapping[str, Any] = _interconnects()["recovery"]
    return constants


@lru_cache(maxsize=1)
def sources() -> Mapping[str, str]:
    """Return what the source keys of devices, links and node types stand for."""
    return {**_interconnects()["sources"], **read_compiled(_HERE / "devices.json")["sources"]}


def read_compiled(path: Path) -> dict[str, Any]:
    """Return a compiled catalogue.

    Raises:
        BrokenFile: the file is missing or damaged.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenFile(path, "cannot be read as JSON", "reinstall, or run scripts/generate/catalogues.py") from error
    return data


@lru_cache(maxsize=1)
def _devices() -> dict[str, Any]:
    table: dict[str, Any] = read_compiled(_HERE / "devices.json")["devices"]
    return table


@lru_cache(maxsize=1)
def _interconnects() -> dict[str, Any]:
    return read_compiled(_HERE / "interconnects.json")


def _find(what: str, name: str, table: Mapping[str, Any], value_type: type[_Value], hint: str) -> _Value:
    position = table["names"].get(normalise(name))
    if position is None:
        raise UnknownName(what, name, _spellings(table), hint=hint)
    return _build(value_type, table["rows"][position])


def _spellings(table: Mapping[str, Any]) -> list[str]:
    return [spelling for row in table["rows"] for spelling in (row["name"], *row.get("aliases", ()))]


def _build(value_type: type[_Value], row: Mapping[str, Any]) -> _Value:
    return value_type(**{key: _frozen(given) for key, given in row.items()})


def _frozen(given: Any) -> Any:
    if isinstance(given, list):
        return tuple(_frozen(item) for item in given)
    if isinstance(given, dict):
        return {key: _frozen(item) for key, item in given.items()}
    return given
