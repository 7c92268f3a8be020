"""The models that dsplan knows by name. Reads the compiled JSON and builds only the models that are asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import normalise, read_compiled
from hardware_db.handed_in import quote
from planner.errors import DsplanError, UnknownName
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
    """Return whether `find_model` would find `name`."""
    return _row(name) is not None


def taken_for(name: str) -> str | None:
    """Return the Hub id of the model that a name is taken for, where it names another organisation's; else None."""
    row = _row(name)
    organisation, slash, _ = name.strip().rpartition("/")
    if row is None or not slash:
        return None
    own = {spelling.rpartition("/")[0].lower() for spelling in (row["name"], *row["aliases"])}
    return None if organisation.lower() in own else str(row["name"])


def public_name(model: Mapping[str, Any]) -> str | None:
    """Return what everybody may call the model of a plan's section: its Hub id in the catalogue, else kind and size.

    None for a module of one's own, whose architecture is a secret too.
    """
    row = _row(str(model.get("name")))
    if row is not None:
        return str(row["name"])
    kind, size = model.get("model_type"), model.get("parameters")
    return None if not kind or model.get("kind") == "custom" else f"{kind} of {size} parameters"


def find_model(name: str) -> ModelFacts:
    """Return the model with this Hub id or alias.

    The organisation, case, spaces, dashes and underscores do not count, nor do words for a training or a storage that
    leaves the shapes as they are (`-Instruct`, `-hf`, `-bnb-4bit`).

    Raises:
        DsplanError: no row answers to the name, or it is that of a family; the message names what may be meant.
    """
    row = _row(name)
    if row is None:
        raise _unknown(name)
    return _build(row)


def _row(name: str) -> Mapping[str, Any] | None:
    if not name.isascii():  # no model's name has other letters, which spellings that are compared would lose
        return None
    for spelling in (normalise(name), normalise(name.rpartition("/")[2])):
        for table in (_table(), _recorded()):
            if spelling in table["names"]:
                row: Mapping[str, Any] = table["rows"][table["names"][spelling]]
                return row
    words = _shape_words(name)
    return _by_words().get(words) or _by_words().get(tuple(word for word in words if word != "base"))


# Names that no row spells out: those of trainings and storages of a model, of families, of models of the Hub.


_WORD = re.compile(r"[0-9]+(?:\.[0-9]+)?[bm](?![a-z0-9])|[0-9]+(?:\.[0-9]+)*|[a-z]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SAME_SHAPES = frozenset(
    ("instruct", "chat", "hf", "it", "pt", "sft", "dpo", "meta", "bnb", "awq", "gptq", "gguf", "bf", "fp", "bit")
)
"""Words of a name that say how a model was trained or is stored; `base` may be a size as well (bert-base)."""
_STORED_BITS = re.compile(r"(bf16|fp16|fp8|int8|int4|4bit|8bit|[48]-bit)$")
_OFFERED = 8
"""Models of a family that an error names."""


def _words(name: str) -> tuple[str, ...]:
    """`Llama-3.1-8B-Instruct` as llama, 3.1, 8b, instruct; the organisation does not count."""
    return tuple(_WORD.findall(name.rpartition("/")[2].lower()))


def _shape_words(name: str) -> tuple[str, ...]:
    """Return the words of a name without those that leave the shapes as they are."""
    plain = name.rpartition("/")[2].lower()
    while (shorter := _STORED_BITS.sub("", plain).rstrip("-_")) != plain:
        plain = shorter
    return tuple(word for word in _words(plain) if word not in _SAME_SHAPES)


@lru_cache(maxsize=1)
def _by_words() -> Mapping[tuple[str, ...], Mapping[str, Any] | None]:
    """Rows by the words of their names; None where two rows have the same."""
    index: dict[tuple[str, ...], Mapping[str, Any] | None] = {}
    for row in _rows():
        for words in {_shape_words(spelling) for spelling in (row["name"], *row["aliases"])}:
            index[words] = row if index.get(words, row) is row else None
    return index


def _unknown(name: str) -> DsplanError:
    """Return why a name stands for no model, and what may be meant."""
    short = name.rpartition("/")[2]
    family = _family(short)
    if len(family) > 1:
        more = f" and {len(family) - _OFFERED} more" if len(family) > _OFFERED else ""
        text = f"{quote(name)} is the name of several models: {', '.join(family[:_OFFERED])}{more}; name one of them"
        return DsplanError(f"{text} (`dsplan models` lists all)")
    if not _HUB_ID.fullmatch(name):
        hint = "`dsplan models` lists them; a config.json, --model-size 6.7B or package.module:factory work too"
        return UnknownName("model", short or name, family or _spellings(), hint=hint)
    size = re.search(r"(?<![0-9.x])([0-9]+(?:\.[0-9]+)?[bm])(?![a-z])", short.lower())
    by_size = f"--model-size {size[1].upper()}" if size else "a size such as --model-size 6.7B"
    not_asked = "`dsplan models` lists what is known, and the Hub was not asked"
    hint = f"{not_asked}: download {name}'s config.json and give its path to --model, or give {by_size}"
    return UnknownName("model", short, _spellings(), hint=hint, called=name)


def _family(name: str) -> list[str]:
    """Return the shortest names of the models whose names have all the words of this one, smallest model first."""
    wanted = [word for word in _words(name) if word not in _SAME_SHAPES]
    if not name.isascii() or not any(word.isalpha() and len(word) > 1 for word in wanted):
        return []
    sized = []
    for row in _rows():
        spellings = (*row["aliases"], row["name"])
        fitting = [spelling for spelling in spellings if _has_words(_words(spelling), wanted)]
        if fitting:
            shortest = min((spelling.rpartition("/")[2] for spelling in fitting), key=len)
            sized.append((row["parameters"], shortest))
    return [shortest for _, shortest in sorted(sized)]


def _has_words(words: tuple[str, ...], wanted: Sequence[str]) -> bool:
    """Return whether all are there, the first of them first; 3 is there where 3.1 is."""
    begins = bool(words) and words[0] == wanted[0]
    return begins and all(any(word == own or own.startswith(f"{word}.") for own in words) for word in wanted)


def _rows() -> list[Mapping[str, Any]]:
    return [*_table()["rows"], *_recorded()["rows"]]


def _spellings() -> list[str]:
    return [spelling for row in _rows() for spelling in (*row["aliases"], row["name"], row["name"].rpartition("/")[2])]


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
