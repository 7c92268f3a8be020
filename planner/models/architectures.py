"""What a model_type means, from the compiled `architectures.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import read_compiled
from planner.errors import UnknownName

COMPILED = Path(__file__).parent / "architectures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One entry of `architectures.yaml`, whose head says what the fields hold."""

    model_type: str
    architecture: str
    kind: str
    block_class: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nested: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def model_types() -> tuple[str, ...]:
    """Every model_type that is known, in the order of `architectures.yaml`."""
    return tuple(_entries())


def find_architecture(model_type: str) -> Architecture:
    """The entry of a model_type.

    Raises:
        UnknownName: there is none.
    """
    entries = _entries()
    if model_type not in entries:
        hint = "plan it from code instead: --model package.module:factory, a function that returns the model"
        raise UnknownName("model_type", model_type, entries, hint=hint)
    entry = entries[model_type]
    return Architecture(
        model_type=model_type,
        **entry
        | {"read": {fact: tuple(keys) for fact, keys in entry.get("read", {}).items()}}
        | {"only": {key: tuple(values) for key, values in entry.get("only", {}).items()}},
    )


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    return read_compiled(COMPILED)
