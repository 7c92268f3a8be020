"""The models that dsplan knows by name. Reads the compiled JSON and builds only the models that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import normalise, read_compiled
from planner.errors import UnknownName
from planner.models.facts import BlockCount, BlockWork, MlaFacts, ModelFacts, ParameterCounts, TowerFacts

COMPILED = Path(__file__).parent / "catalogue.json"
RECORDED = Path(__file__).parent / "recorded.json"
_PARTS: Mapping[str, type[MlaFacts] | type[TowerFacts]] = {"mla": MlaFacts, "text": TowerFacts, "vision": TowerFacts}


@lru_cache(maxsize=1)
def models() -> tuple[ModelFacts, ...]:
    """Every model that figures describe, in the order of `catalogue.yaml`."""
    return tuple(_build(row) for row in _table()["rows"])


@lru_cache(maxsize=1)
def recorded_models() -> tuple[ModelFacts, ...]:
    """Every model whose blocks were recorded, in the order of `recorded.yaml`."""
    return tuple(_build(row) for row in _recorded()["rows"])


def every_model() -> tuple[ModelFacts, ...]:
    """All that `find_model` finds."""
    return (*models(), *recorded_models())


def recorded_config(name: str) -> Mapping[str, Any]:
    """Model type, class and the arguments of its transformers config, of a recorded model."""
    table = _recorded()
    config: Mapping[str, Any] = table["configs"][table["names"][normalise(name)]]
    return config


def knows_model(name: str) -> bool:
    """Whether `find_model` would find `name`."""
    return _row(name) is not None


def find_model(name: str) -> ModelFacts:
    """The model with this Hub id or alias; the organisation, case, spaces, dashes and underscores do not count.

    Raises:
        UnknownName: no row answers to the name.
    """
    found = _row(name)
    if found is None:
        hint = "`dsplan models` lists them; a config.json, --model-size 6.7B or package.module:factory work too"
        raise UnknownName("model", name.rpartition("/")[2] or name, _spellings(), hint=hint)
    return _build(found)


def _row(name: str) -> Mapping[str, Any] | None:
    for spelling in (normalise(name), normalise(name.rpartition("/")[2])):
        for table in (_table(), _recorded()):
            if spelling in table["names"]:
                row: Mapping[str, Any] = table["rows"][table["names"][spelling]]
                return row
    return None


def _spellings() -> list[str]:
    rows = [*_table()["rows"], *_recorded()["rows"]]
    return [spelling for row in rows for spelling in (*row["aliases"], row["name"], row["name"].rpartition("/")[2])]


def _build(row: Mapping[str, Any]) -> ModelFacts:
    parts: dict[str, Any] = {key: kind(**row[key]) for key, kind in _PARTS.items() if key in row}
    if "work" in row:
        parts["work"] = tuple(_work(work) for work in row["work"])
    if "measured_counts" in row:
        parts["measured_counts"] = counts_from_document(row["measured_counts"])
    return ModelFacts(**{**row, **parts, "aliases": tuple(row["aliases"])})


def _work(row: Mapping[str, Any]) -> BlockWork:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return BlockWork(**values)


def counts_from_document(document: Mapping[str, Any]) -> ParameterCounts:
    """Parameter counts from their JSON."""
    blocks = tuple(
        BlockCount(
            **{
                **block,
                "shapes": _shapes(block["shapes"]),
                "frozen": tuple(block.get("frozen", ())),
                "names": (),
                "adapters": (),
            }
        )
        for block in document["blocks"]
    )
    parts = {"outside": _shapes(document["outside"]), "frozen": tuple(document.get("frozen", ())), "names": ()}
    return ParameterCounts(**{**document, **parts, "blocks": blocks})


def _shapes(raw: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in raw)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return read_compiled(COMPILED)


@lru_cache(maxsize=1)
def _recorded() -> dict[str, Any]:
    return read_compiled(RECORDED)
