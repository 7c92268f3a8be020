"""Dataclasses from the objects that JSON and YAML give, as `asdict` wrote them. What is wrong with one is one line.

msgspec is imported where the first value is read: it costs 6 ms, and `recommend` reads none.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hardware_db.errors import DsplanError

Value = TypeVar("Value")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_PLACE = re.compile(r" - at `(.*)`$")
_EXPECTED = re.compile(r"Expected `([\w| ]+)`, got `\w+`")
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


class WrongValue(DsplanError):
    """A key that is missing, unknown or holds what it cannot; `where` names it, as in `measured.steps`."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} {problem}" if where else problem)
        self.where = where
        self.problem = problem


def from_json(kind: type[Value], document: object, *, spelled: Mapping[str, str] | None = None) -> Value:
    """Return the dataclass `kind` of an object with exactly its keys; lists become tuples where it has tuples.

    `spelled` gives the document's word for a field, in messages.

    Raises:
        WrongValue: a key is missing, unknown or holds another kind of value.
        DsplanError: what the dataclass itself refuses.
    """
    import msgspec

    try:
        value = msgspec.convert(document, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), kind, document, spelled or {}) from None
    _refuse_unknown_keys(value, document, "", spelled or {})
    return value


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"no {kind.__name__}")


def _refuse_unknown_keys(value: object, document: object, where: str, spelled: Mapping[str, str]) -> None:
    """Msgspec passes over keys that a dataclass does not have.

    Raises:
        WrongValue: there is one.
    """
    if is_dataclass(value) and isinstance(document, Mapping):
        names = [item.name for item in fields(value)]
        for name, inner in document.items():
            key_path = f"{where}.{name}" if where else spelled.get(name, str(name))
            if name not in names:
                words = ", ".join(names if where else (spelled.get(word, word) for word in names))
                raise WrongValue(key_path, f"is not a key; the keys are {words}")
            _refuse_unknown_keys(getattr(value, name), inner, key_path, spelled)
    elif isinstance(value, tuple) and isinstance(document, Sequence):
        for index, (item, inner) in enumerate(zip(value, document, strict=True)):
            _refuse_unknown_keys(item, inner, f"{where}[{index}]", spelled)


def _wrong_value(text: str, kind: type[Any], document: object, spelled: Mapping[str, str]) -> WrongValue:
    """Msgspec's message in the words of a person."""
    position = _PLACE.search(text)
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", position[1].partition("[...]")[0]) if position else []
    value: Any = document
    for name, index in steps:
        value = value[name] if name else value[int(index)]
    given = reprlib.repr(value)
    missing = _MISSING.match(text)
    names = [*steps, (missing[1], "")] if missing else steps
    where = "".join(f".{name}" if name else f"[{index}]" for name, index in names).removeprefix(".")
    first = re.split(r"[.\[]", where)[0]
    where = spelled.get(first, first) + where.removeprefix(first)
    if missing:
        return WrongValue(where, "is missing")
    if expected := _EXPECTED.match(text):
        wanted = " or ".join(_WORDS.get(word, word) for word in expected[1].split(" | "))
        return WrongValue(where or "line", f"is {given}; it must be {wanted}")
    if text.startswith("Invalid enum value"):
        return WrongValue(where, f"{given} is not one of {', '.join(map(str, _choices(kind, steps)))}")
    if text.startswith("Number out of range"):
        return WrongValue(where, "is beyond any floating-point number")
    return WrongValue(where, f"is {given} ({_PLACE.sub('', text)})")


def _choices(hint: Any, steps: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """Return the words that a field may hold."""
    for name, _ in steps:
        options = [option for option in (hint, *get_args(hint)) if is_dataclass(option)]
        hint = get_type_hints(options[0])[name] if name and options else next(iter(get_args(hint)), hint)
    literals = [option for option in (hint, *get_args(hint)) if get_origin(option) is Literal]
    return tuple(word for option in literals for word in get_args(option))
