"""Values from their JSON: dataclasses, tuples and mappings as the annotations of their fields say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Value = TypeVar("Value")


def rebuild(kind: type[Value], document: Mapping[str, Any]) -> Value:
    """The value whose `asdict` was written as JSON, tuples having become lists on the way.

    Raises:
        KeyError, TypeError, ValueError: the document is not that of such a value.
    """
    hints = get_type_hints(kind)
    known = {item.name for item in fields(cast("Any", kind))}
    if unknown := document.keys() - known:
        raise KeyError(f"{kind.__name__} has no fields {', '.join(sorted(unknown))}")
    return kind(**{name: _value(hints[name], value) for name, value in document.items()})


def _value(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if value is None:
        return None
    if origin in (Union, UnionType):
        options = [option for option in inner if option is not NoneType]
        return _value(options[0], value) if len(options) == 1 else value
    if is_dataclass(hint):
        return rebuild(cast("type[Any]", hint), value)
    if origin is tuple:
        kinds = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_value(kind, one) for kind, one in zip(kinds, value, strict=True))
    if origin is Mapping:
        return {name: _value(inner[1], one) for name, one in value.items()}
    return value
