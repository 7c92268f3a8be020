"""The models that dsplan knows by name. Reads the compiled JSON and builds only the models that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import normalise, read_compiled
from planner.errors import UnknownName
from planner.models.facts import MlaFacts, ModelFacts, TowerFacts

COMPILED = Path(__file__).parent / "catalogue.json"
_PARTS: Mapping[str, type[MlaFacts] | type[TowerFacts]] = {"mla": MlaFacts, "text": TowerFacts, "vision": TowerFacts}


@lru_cache(maxsize=1)
def models() -> tuple[ModelFacts, ...]:
    """Every model, in the order of `catalogue.yaml`."""
    return tuple(_build(row) for row in _table()["rows"])


def knows_model(name: str) -> bool:
    """Whether `find_model` would find `name`."""
    return _position(name) is not None


def find_model(name: str) -> ModelFacts:
    """The model with this Hub id or alias; the organisation, case, spaces, dashes and underscores do not count.

    Raises:
        UnknownName: no row answers to the name.
    """
    position = _position(name)
    if position is None:
        hint = "`dsplan models` lists them; a config.json, --model-size 6.7B or package.module:factory work too"
        raise UnknownName("model", name.rpartition("/")[2] or name, _spellings(), hint=hint)
    return _build(_table()["rows"][position])


def _position(name: str) -> int | None:
    names: dict[str, int] = _table()["names"]
    whole = names.get(normalise(name))
    return names.get(normalise(name.rpartition("/")[2])) if whole is None else whole


def _spellings() -> list[str]:
    rows = _table()["rows"]
    return [spelling for row in rows for spelling in (*row["aliases"], row["name"], row["name"].rpartition("/")[2])]


def _build(row: Mapping[str, Any]) -> ModelFacts:
    parts = {key: kind(**row[key]) for key, kind in _PARTS.items() if key in row}
    return ModelFacts(**{**row, **parts, "aliases": tuple(row["aliases"])})


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return read_compiled(COMPILED)
