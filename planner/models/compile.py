"""The YAML files beside this one into the JSON that is read at run time; `scripts/generate/catalogues.py` calls it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hardware_db.datasheets.compile import check_row, read_yaml
from hardware_db.datasheets.loader import name_index
from hardware_db.files import read_shipped_yaml
from planner.errors import BrokenFile
from planner.models.counting.count import active_parameters, count_parameters
from planner.models.facts import MlaFacts, ModelFacts, TowerFacts
from planner.models.from_hf.reader import Architecture

HERE = Path(__file__).parent
PARTS: dict[str, type] = {"mla": MlaFacts, "text": TowerFacts, "vision": TowerFacts}
BOOKKEEPING = frozenset({
    "params_published", "params_published_text", "params_published_basis", "params_published_source",
    "params_formula", "params_instantiated", "instantiated_class", "published_deviation_pct",
    "active_params_published", "active_params_formula", "source",
})  # fmt: skip
_ENTRY_KEYS = frozenset(field.name for field in dataclasses.fields(Architecture)) - {"model_type"} | {"extends"}
_SECTIONS = ("facts", "read", "defaults", "nested", "only")
_FIXED = frozenset(("fused_qkv", "fused_gate_up", "splits_sequences"))
"""Facts that the code of an architecture fixes, whatever its sizes."""
_FACTS = {field.name: field for field in dataclasses.fields(ModelFacts)}


def compile_architectures(path: Path = HERE / "from_hf" / "architectures.yaml") -> str:
    """`architectures.yaml` as JSON text, with every `extends` resolved and the templates (`_name`) left out.

    Raises:
        BrokenFile: an entry has an unknown key, an unknown field of ModelFacts, or extends nothing.
    """
    entries = _read_entries(path)
    resolved = {name: _resolve(name, entries, path) for name in entries}
    return _json({name: entry for name, entry in resolved.items() if not name.startswith("_")})


def compile_catalogue(
    path: Path = HERE / "catalogue.yaml", architectures: Path = HERE / "from_hf" / "architectures.yaml"
) -> str:
    """`catalogue.yaml` as JSON text: rows without the fields at their defaults, and the row of every name and alias.

    Raises:
        BrokenFile: a row has an unknown, missing or ill-typed key, no source, or a name that is already taken.
    """
    entries = json.loads(compile_architectures(architectures))
    rows = [_row(row, position, entries, path) for position, row in enumerate(read_yaml(path, {"models"})["models"])]
    # A Hub id answers without its organisation too.
    spelled = [{**row, "aliases": [*row["aliases"], row["name"].rpartition("/")[2]]} for row in rows]
    return _json({"names": name_index(spelled, path), "rows": rows})


def _row(row: Any, position: int, entries: dict[str, Any], path: Path) -> dict[str, Any]:
    if not isinstance(row, dict) or not row.get("source"):
        raise BrokenFile(path, f"row {position} has no source", "cite where its figures come from")
    figures = {"name": row.get("id"), **{key: value for key, value in row.items() if key not in {*BOOKKEEPING, "id"}}}
    if row.get("model_type") not in entries:
        raise BrokenFile(path, f"row {row.get('id')!r} has model_type {row.get('model_type')!r}", "add its entry")
    figures |= _from_architecture(entries[row["model_type"]]) | {"parameters": 0, "active_parameters": 0}
    parts = {key: _part(row, key, path) for key in PARTS if row.get(key)}
    checked = check_row(figures | parts, ModelFacts, path, position)
    facts = ModelFacts(**checked | {"aliases": tuple(checked.get("aliases", ()))})
    counts = count_parameters(facts)
    facts = dataclasses.replace(facts, parameters=counts.total, active_parameters=active_parameters(facts, counts))
    return compact_row(facts)


def _part(row: dict[str, Any], key: str, path: Path) -> Any:
    try:
        return PARTS[key](**row[key])
    except TypeError as error:
        keys = ", ".join(field.name for field in dataclasses.fields(PARTS[key]))
        raise BrokenFile(path, f"row {row.get('id')!r} key {key!r}: {error}", f"its keys are {keys}") from error


def _from_architecture(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what the architecture fixes and a row does not repeat."""
    fixed = {key: value for key, value in entry.get("facts", {}).items() if key in _FIXED}
    keys, defaults = entry.get("read", {}), entry.get("defaults", {})
    dropouts = {
        fact: next((defaults[key] for key in keys.get(fact, ()) if key in defaults), 0.0)
        for fact in ("hidden_dropout", "attention_dropout")
    }
    return {"block_class": entry["block_class"], **fixed, **dropouts}


def compact_row(facts: ModelFacts) -> dict[str, Any]:
    """Return the row without the fields at their defaults, as JSON keeps it."""
    given = {name: getattr(facts, name) for name in _FACTS}
    short = {name: value for name, value in given.items() if value != _default(_FACTS[name]) or name == "aliases"}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        for name, value in short.items()
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _read_entries(path: Path) -> dict[str, Any]:
    entries: dict[str, Any] = read_shipped_yaml(path)
    for name, entry in entries.items():
        unknown = [key for key in entry if key not in _ENTRY_KEYS]
        unknown += [fact for section in ("facts", "read") for fact in entry.get(section, {}) if fact not in _FACTS]
        if unknown:
            raise BrokenFile(path, f"entry {name!r} has unknown key {unknown[0]!r}", f"keys are {sorted(_ENTRY_KEYS)}")
        if entry.get("extends", name) not in entries:
            raise BrokenFile(path, f"entry {name!r} extends unknown {entry['extends']!r}", "name another entry")
    return entries


def _resolve(name: str, entries: dict[str, Any], path: Path) -> dict[str, Any]:
    own = dict(entries[name])
    base = _resolve(own.pop("extends"), entries, path) if "extends" in own else {}
    merged = base | {key: value for key, value in own.items() if key not in _SECTIONS}
    for section in _SECTIONS:
        values = base.get(section, {}) | own.get(section, {})
        if section == "read":
            values = {fact: _spellings(keys) for fact, keys in values.items() if keys is not None}
        if values:
            merged[section] = values
    return merged


def _spellings(keys: str | list[str]) -> list[str]:
    return [keys] if isinstance(keys, str) else keys


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
